"use strict";
const drawings = JSON.parse(document.getElementById("drawings").textContent);
const stage = document.getElementById("stage");
const panel = document.getElementById("panel");
const choice = document.getElementById("moment");
let drawing, svg, zoom = 1, chosen = null;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function section(heading, rows) {
  if (!rows.length) return;
  const list = element("ul");
  list.append(...rows);
  panel.append(element("h3", heading), list);
}

function row(text, className) {
  return element("li", text, className);
}

// A row that leads to a link: the other callback's name, and below it why.
function linkRow(i, other) {
  const link = drawing.links[i];
  const item = element("li", undefined, link.kind === "order" ? "" : "wrong");
  const go = element("button", drawing.nodes[other].title);
  go.type = "button";
  go.addEventListener("click", () => showNode(other, true));
  go.addEventListener("mouseenter", () => mark([drawing.links[i].earlier, drawing.links[i].later], [i]));
  go.addEventListener("mouseleave", () => remark());
  const why = element("button", link.label || "why");
  why.type = "button";
  why.title = "show this edge";
  why.addEventListener("click", () => showLink(i, true));
  item.append(go, " ", why, ...link.reasons.filter((reason) => reason !== link.label).map((reason) => element("small", reason)));
  return item;
}

function showNode(i, focus) {
  choose("node", i, focus);
  const node = drawing.nodes[i];
  const heading = element("h2", node.title);
  panel.replaceChildren(heading, element("p", node.where));
  for (const [name, lines] of node.details) section(name, lines.map((line) => row(line)));
  const ends = drawing.links.map((link, number) => ({ ...link, number }));
  const ordered = ends.filter((link) => link.kind !== "conflict");
  section("runs after", ordered.filter((link) => link.later === i).map((link) => linkRow(link.number, link.earlier)));
  section("runs before", ordered.filter((link) => link.earlier === i).map((link) => linkRow(link.number, link.later)));
  const clashes = ends.filter((link) => link.kind === "conflict" && (link.earlier === i || link.later === i));
  section("in conflict with", clashes.map((link) => linkRow(link.number, link.earlier === i ? link.later : link.earlier)));
}

function showLink(i, focus) {
  choose("link", i, focus);
  const link = drawing.links[i];
  const word = { order: "runs before", cycle: "runs before", conflict: "is in conflict with" }[link.kind];
  panel.replaceChildren(element("h2", `${drawing.nodes[link.earlier].title} ${word} ${drawing.nodes[link.later].title}`));
  if (link.kind === "cycle") panel.append(element("p", "This is part of a cycle: no order satisfies all of it.", "wrong"));
  if (link.implied) panel.append(element("p", "This follows from other edges, too."));
  section("why", link.reasons.map((reason) => row(reason, link.kind === "conflict" ? "wrong" : "")));
  section("at", link.moments.map((moment) => row(moment)));
  section("between", [link.earlier, link.later].map((node) => {
    const item = element("li");
    const go = element("button", drawing.nodes[node].title);
    go.type = "button";
    go.addEventListener("click", () => showNode(node, true));
    item.append(go);
    return item;
  }));
}

function showNothing() {
  chosen = null;
  for (const old of svg.querySelectorAll(".chosen")) old.classList.remove("chosen");
  remark();
  panel.replaceChildren(element("h2", drawing.title));
  const clashes = drawing.links.filter((link) => link.kind === "conflict").length;
  const counted = `${drawing.nodes.length} callbacks, ${drawing.links.length - clashes} edges`;
  panel.append(element("p", clashes ? `${counted}, ${clashes} in conflict` : counted));
  section("what is wrong", drawing.problems.map((problem) => row(problem, "wrong")));
  section("callbacks", drawing.nodes.map((node, i) => {
    const item = element("li");
    const go = element("button", node.title);
    go.type = "button";
    go.addEventListener("click", () => showNode(i, true));
    item.append(go);
    return item;
  }));
}

function part(kind, i) {
  return svg.querySelector(`.${kind}[data-${kind}="${i}"]`);
}

function choose(kind, i, focus) {
  for (const old of svg.querySelectorAll(".chosen")) old.classList.remove("chosen");
  chosen = [kind, i];
  const picked = part(kind, i);
  picked.classList.add("chosen");
  if (focus) picked.scrollIntoView({ block: "nearest", inline: "nearest" });
  remark();
  panel.scrollTop = 0;
}

// Light some nodes and links up, and dim the others.
function mark(nodes, links) {
  svg.classList.add("marking");
  for (const lit of svg.querySelectorAll(".lit")) lit.classList.remove("lit");
  for (const i of nodes) part("node", i).classList.add("lit");
  for (const i of links) for (const lit of svg.querySelectorAll(`[data-link="${i}"]`)) lit.classList.add("lit");
}

function markNode(i) {
  const links = [...drawing.links.keys()].filter((n) => drawing.links[n].earlier === i || drawing.links[n].later === i);
  mark([i, ...links.flatMap((n) => [drawing.links[n].earlier, drawing.links[n].later])], links);
}

function markLink(i) {
  mark([drawing.links[i].earlier, drawing.links[i].later], [i]);
}

function remark() {
  if (!chosen) svg.classList.remove("marking");
  else if (chosen[0] === "node") markNode(chosen[1]);
  else markLink(chosen[1]);
}

function setZoom(value) {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const before = zoom;
  const middle = [stage.scrollLeft + stage.clientWidth / 2, stage.scrollTop + stage.clientHeight / 2];
  zoom = Math.min(4, Math.max(0.1, value));
  svg.setAttribute("width", width * zoom);
  svg.setAttribute("height", height * zoom);
  stage.scrollLeft = (middle[0] * zoom) / before - stage.clientWidth / 2;
  stage.scrollTop = (middle[1] * zoom) / before - stage.clientHeight / 2;
}

function fit() {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  setZoom(Math.min(1, stage.clientWidth / width, stage.clientHeight / height));
}

function open(number) {
  drawing = drawings[number];
  stage.replaceChildren(document.getElementById(`drawing-${number}`).content.cloneNode(true));
  svg = stage.querySelector("svg");
  svg.removeAttribute("role");
  zoom = 1;
  for (const made of svg.querySelectorAll(".node")) {
    const i = Number(made.dataset.node);
    made.setAttribute("tabindex", "0");
    made.setAttribute("role", "button");
    made.setAttribute("aria-label", `${drawing.nodes[i].title}, ${drawing.nodes[i].where}`);
    made.addEventListener("mouseenter", () => markNode(i));
    made.addEventListener("focus", () => markNode(i));
    made.addEventListener("blur", remark);
  }
  for (const made of svg.querySelectorAll(".link")) {
    const line = made.querySelector(".line").cloneNode();
    line.removeAttribute("stroke-dasharray");
    line.setAttribute("class", "hit");
    made.append(line);
    made.addEventListener("mouseenter", () => markLink(Number(made.dataset.link)));
  }
  for (const made of svg.querySelectorAll(".node, .link")) made.addEventListener("mouseleave", remark);
  stage.scrollTo(0, 0);
  showNothing();
}

let pressed = null;
stage.addEventListener("pointerdown", (event) => {
  if (event.button === 0 && event.pointerType === "mouse")
    pressed = { x: event.clientX, y: event.clientY, left: stage.scrollLeft, top: stage.scrollTop, moved: false };
});
window.addEventListener("pointermove", (event) => {
  if (!pressed) return;
  const [x, y] = [event.clientX - pressed.x, event.clientY - pressed.y];
  if (Math.abs(x) + Math.abs(y) > 5) pressed.moved = true;
  if (!pressed.moved) return;
  stage.classList.add("dragged");
  stage.scrollTo(pressed.left - x, pressed.top - y);
});
window.addEventListener("pointerup", () => {
  stage.classList.remove("dragged");
  setTimeout(() => { pressed = null; });
});
stage.addEventListener("click", (event) => {
  if (pressed && pressed.moved) return;
  const node = event.target.closest(".node");
  const link = event.target.closest(".link, .label");
  if (node) showNode(Number(node.dataset.node));
  else if (link && link.dataset.link) showLink(Number(link.dataset.link));
  else showNothing();
});
stage.addEventListener("wheel", (event) => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  setZoom(zoom * (event.deltaY < 0 ? 1.15 : 1 / 1.15));
}, { passive: false });
window.addEventListener("keydown", (event) => {
  const node = document.activeElement && document.activeElement.closest(".node");
  if (node && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    showNode(Number(node.dataset.node));
  } else if (event.ctrlKey || event.metaKey || event.altKey || document.activeElement === choice) return;
  else if (event.key === "Escape") showNothing();
  else if (event.key === "+") setZoom(zoom * 1.25);
  else if (event.key === "-") setZoom(zoom / 1.25);
  else if (event.key === "0") setZoom(1);
});
document.getElementById("in").addEventListener("click", () => setZoom(zoom * 1.25));
document.getElementById("out").addEventListener("click", () => setZoom(zoom / 1.25));
document.getElementById("fit").addEventListener("click", fit);
choice.addEventListener("change", () => open(Number(choice.value)));
open(Number(choice.value));

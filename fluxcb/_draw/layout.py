"""Where everything stands: columns of boxes from left to right, and a lane of its own for each link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor

from fluxcb._draw.boxes import LABEL, Text, text_width, write_box
from fluxcb._draw.drawing import Drawing, Link
from fluxcb._draw.layers import Layering, assign_layers
from fluxcb._draw.ordering import order_layers
from fluxcb._draw.placing import place_items
from fluxcb._draw.routing import Net, route_channel, spread

__all__ = ["Box", "Layout", "Point", "Route", "arrange"]

Point = tuple[float, float]

BOX_GAP, LANE_GAP, BOX_LANE_GAP = 24.0, 12.0, 16.0
TRACK, STUB, ARROW = 9.0, 14.0, 12.0
PORT, ROOMY_PORT, CORNER = 10.0, 14.0, 7.0
"""Distance of two links at a box's side, where links have room for labels, and of a link from its corner (pixels)."""
FEW, LABEL_ROOM = 40, 120.0
"""Up to how many links there is room kept for labels, and how much (pixels)."""
GROUP_GAP = 46.0
ALONE_GAP = 16.0
LEAST_WIDTH = 900.0


@dataclass(frozen=True)
class Box:
    """A node's place."""

    x: float
    y: float
    width: float
    height: float
    text: Text


@dataclass(frozen=True)
class Route:
    """A link's way.

    Attributes:
        points: The corners of its line, from the node called `earlier` to the one called `later`.
    """

    points: tuple[Point, ...]


@dataclass(frozen=True)
class Layout:
    """Where everything stands (pixels, from the upper left).

    Attributes:
        boxes: One for each node.
        routes: One for each link.
        width: Width of the whole.
        height: Height of the whole.
        alone: Where the nodes that have no link begin, if there are some beside others that have.
    """

    boxes: tuple[Box, ...]
    routes: tuple[Route, ...]
    width: float
    height: float
    alone: float | None


@dataclass(frozen=True)
class _Group:
    """Nodes that hang together, laid out from (0, 0)."""

    nodes: list[int]
    links: list[int]
    boxes: list[Box]
    routes: list[Route]
    width: float
    height: float


def arrange(drawing: Drawing) -> Layout:
    """Lay a drawing out.

    Args:
        drawing: What to show; links join two different nodes.

    Returns:
        The places; the same drawing is always laid out in the same way.
    """
    number = {node.key: i for i, node in enumerate(drawing.nodes)}
    texts = [write_box(node) for node in drawing.nodes]
    ends = [(number[link.earlier], number[link.later]) for link in drawing.links]
    groups, alone = _components(len(texts), ends)
    boxes: dict[int, Box] = {}
    routes: dict[int, Route] = {}
    roomy = len(ends) <= FEW
    laid = [_lay_group(nodes, links, drawing.links, ends, texts, roomy=roomy) for nodes, links in groups]
    laid.sort(key=lambda group: (-len(group.nodes), group.nodes[0]))
    limit = max([LEAST_WIDTH, *(group.width for group in laid)])
    x = y = shelf = width = 0.0
    for group in laid:  # large ones below each other, small ones side by side
        if x and x + group.width > limit:
            x, y, shelf = 0.0, y + shelf + GROUP_GAP, 0.0
        for node, box in zip(group.nodes, group.boxes, strict=True):
            boxes[node] = Box(box.x + x, box.y + y, box.width, box.height, box.text)
        for link, route in zip(group.links, group.routes, strict=True):
            routes[link] = Route(tuple((a + x, b + y) for a, b in route.points))
        shelf, width = max(shelf, group.height), max(width, x + group.width)
        x += group.width + 2 * GROUP_GAP
    bottom = y + shelf
    caption = None
    if alone:
        top = bottom + GROUP_GAP if laid else 0.0
        caption = top if laid else None
        rows, used, bottom = _shelves([texts[node] for node in alone], limit, top)
        boxes.update(zip(alone, rows, strict=True))
        width = max(width, used)
    return Layout(
        tuple(boxes[i] for i in range(len(texts))), tuple(routes[i] for i in range(len(ends))), width, bottom, caption
    )


def _components(count: int, ends: Sequence[tuple[int, int]]) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
    """Return the groups of nodes that hang together, each with its links, and the nodes that have none."""
    root = list(range(count))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for a, b in ends:
        a, b = sorted((find(a), find(b)))
        root[b] = a
    linked = {node for pair in ends for node in pair}
    groups: dict[int, tuple[list[int], list[int]]] = {}
    for node in sorted(linked):
        groups.setdefault(find(node), ([], []))[0].append(node)
    for link, (a, _) in enumerate(ends):
        groups[find(a)][1].append(link)
    return list(groups.values()), [node for node in range(count) if node not in linked]


def _shelves(texts: Sequence[Text], limit: float, top: float) -> tuple[list[Box], float, float]:
    boxes: list[Box] = []
    x = used = shelf = 0.0
    for text in texts:
        if x and x + text.width > limit:
            x, top, shelf = 0.0, top + shelf + ALONE_GAP, 0.0
        boxes.append(Box(x, top, text.width, text.height, text))
        shelf, used = max(shelf, text.height), max(used, x + text.width)
        x += text.width + ALONE_GAP
    return boxes, used, top + shelf


def _lay_group(
    nodes: list[int],
    links: list[int],
    every: Sequence[Link],
    ends: Sequence[tuple[int, int]],
    texts: Sequence[Text],
    *,
    roomy: bool,
) -> _Group:
    # Conflicts last: they decide no layer.
    links = sorted(links, key=lambda link: every[link].kind == "conflict")
    local = {node: i for i, node in enumerate(nodes)}
    pairs = [(local[ends[link][0]], local[ends[link][1]]) for link in links]
    directed = sum(every[link].kind != "conflict" for link in links)
    layering = assign_layers(len(nodes), pairs[:directed], pairs[directed:])
    labels = [min(ceil(text_width(every[link].label, LABEL)) + 8.0, LABEL_ROOM) for link in links]
    group = _GroupLayout(layering, [texts[node] for node in nodes], labels, roomy=roomy)
    routes = []
    for (a, _), chain, points in zip(pairs, layering.chains, group.routes(), strict=True):
        routes.append(Route(tuple(points if chain[0] == a else points[::-1])))
    return _Group(nodes, links, group.boxes, routes, group.width, group.height)


class _GroupLayout:
    """One group's items, placed step by step: order, heights, ports, tracks."""

    def __init__(self, layering: Layering, texts: list[Text], labels: list[float], *, roomy: bool) -> None:
        self.layering = layering
        self.texts = texts
        self.labels = labels
        self.roomy = roomy
        self.port = ROOMY_PORT if roomy else PORT
        count = layering.count
        into, out = [0] * count, [0] * count
        for segment in layering.segments:
            if segment.start < count:
                out[segment.start] += 1
            if segment.end < count:
                into[segment.end] += 1
        for segment in layering.sides:
            out[segment.start] += 1
            out[segment.end] += 1
        self.heights = [
            max(text.height, self.port * (max(a, b) - 1) + 2 * CORNER)
            for text, a, b in zip(texts, into, out, strict=True)
        ]
        self.layers = order_layers(layering)
        self.middle = place_items(self.layers, layering, self._distance)
        top = min(self.middle[i] - height / 2 for i, height in enumerate(self.heights))
        # On a grid of half pixels, on which sums are exact: what is meant to be one height is one.
        self.middle = [floor((y - top) * 2 + 0.5) / 2 for y in self.middle]
        self._place_ports()
        self._route()

    def _distance(self, upper: int, lower: int) -> float:
        count = self.layering.count
        boxes = [item for item in (upper, lower) if item < count]
        gap = (LANE_GAP, BOX_LANE_GAP, BOX_GAP)[len(boxes)]
        return gap + sum(self.heights[item] / 2 for item in boxes)

    def _place_ports(self) -> None:
        """Find the heights at which segments meet boxes, such that as many as possible are straight."""
        self.start: dict[tuple[int, int], float] = {}  # by (link, item): where the link leaves it to the right
        self.end: dict[tuple[int, int], float] = {}
        count, middle = self.layering.count, self.middle
        leaving: dict[int, list[tuple[float, int, int]]] = {}  # by node: (height aimed at, link, other item)
        entering: dict[int, list[tuple[float, int, int]]] = {}
        for segment in self.layering.segments:
            self.start[segment.link, segment.start] = middle[segment.start]
            self.end[segment.link, segment.end] = middle[segment.end]
            if segment.start < count:
                leaving.setdefault(segment.start, []).append((middle[segment.end], segment.link, segment.end))
            if segment.end < count:
                entering.setdefault(segment.end, []).append((middle[segment.start], segment.link, segment.start))
        for segment in self.layering.sides:
            upper, lower = sorted((segment.start, segment.end), key=middle.__getitem__)
            # From the lower corner of the upper box to the upper corner of the lower: nearest to each other.
            leaving.setdefault(upper, []).append((float("inf"), segment.link, lower))
            leaving.setdefault(lower, []).append((float("-inf"), segment.link, upper))
        for ports in (*leaving.values(), *entering.values()):
            ports.sort()
        for _ in range(2):  # the second time, one side knows where the other has found room
            for ports, here, there in ((leaving, self.start, self.end), (entering, self.end, self.start)):
                for node, links in ports.items():
                    low, high = middle[node] - self.heights[node] / 2, middle[node] + self.heights[node] / 2
                    wanted = [
                        min(max(there[link, other] if abs(aim) != float("inf") else aim, low), high)
                        for aim, link, other in links
                    ]
                    found = spread(wanted, self.port, low + CORNER, high - CORNER)
                    here.update({(link, node): y for (_, link, _), y in zip(links, found, strict=True)})

    def _route(self) -> None:
        count = self.layering.count
        widths = [max((self.texts[item].width for item in row if item < count), default=0.0) for row in self.layers]
        column = {item: i for i, row in enumerate(self.layers) for item in row}
        between: list[list[tuple[int, Net]]] = [[] for _ in self.layers]
        for segment in self.layering.segments:
            left, right = self.start[segment.link, segment.start], self.end[segment.link, segment.end]
            between[column[segment.start]].append((segment.link, Net((left,), (right,))))
        for segment in self.layering.sides:
            heights = self.start[segment.link, segment.start], self.start[segment.link, segment.end]
            between[column[segment.start]].append((segment.link, Net(heights, ())))
        self.ways: list[list[Point]] = [[] for _ in self.layering.chains]
        x = 0.0
        boxes: dict[int, Box] = {}
        for row, width, nets in zip(self.layers, widths, between, strict=True):
            for item in row:
                if item < count:
                    height = self.heights[item]
                    boxes[item] = Box(x, self.middle[item] - height / 2, width, height, self.texts[item])
            bends, tracks = route_channel([net for _, net in nets])
            right = x + width
            if nets:
                right += 2 * STUB + TRACK * max(tracks - 1, 0) + ARROW + self._label_room(nets)
            for (link, net), turns in zip(nets, bends, strict=True):
                at = [x + width + STUB + TRACK * bend.track for bend in turns]
                way = [(x + width, net.left[0])]
                for bend, place in zip(turns, at, strict=True):
                    way += [(place, bend.start), (place, bend.end)]
                way.append((right, net.right[0]) if net.right else (x + width, net.left[1]))
                self.ways[link] += way
            x = right
        self.boxes = [boxes[item] for item in range(count)]
        ys = [y for way in self.ways for _, y in way]
        lift = min([box.y for box in self.boxes] + ys)
        self.boxes = [Box(box.x, box.y - lift, box.width, box.height, box.text) for box in self.boxes]
        self.ways = [[(px, py - lift) for px, py in way] for way in self.ways]
        self.width = x
        self.height = max([box.y + box.height for box in self.boxes] + [y - lift for y in ys])

    def _label_room(self, nets: Sequence[tuple[int, Net]]) -> float:
        """Return how much wider labels make the room between two columns; those of conflicts always do."""
        return max((self.labels[link] for link, net in nets if self.roomy or not net.right), default=0.0)

    def routes(self) -> list[list[Point]]:
        """Return each link's corners, left to right, without those at which it goes straight on."""
        return [_corners(way) for way in self.ways]


def _corners(way: Sequence[Point]) -> list[Point]:
    points: list[Point] = []
    for point in way:
        if points and point == points[-1]:
            continue
        if len(points) > 1 and (
            points[-2][0] == points[-1][0] == point[0] or points[-2][1] == points[-1][1] == point[1]
        ):
            points.pop()
        points.append(point)
    return points

"""Pictures of the callback graph. This package does not depend on the rest of fluxcb.

A `Timeline` has a row for each handler of each moment, in execution order, and arcs between rows. It becomes an SVG
image or an HTML page. One dimension is sufficient, because the handlers of each moment have a total order. A
two-dimensional layout would need an algorithm for layers, crossings and routes, and many callbacks would make its
bundles of lines hard to follow.

A `Drawing` has a node for each callback and links between nodes. It becomes text, Mermaid or DOT. Both forms are plain
data, and only the standard library is used, so that pictures can be made wherever Python runs.
"""

"""Pictures of layered graphs.

In comes a `Drawing`: boxes with text, and links between them. Out go SVG and HTML that stand alone. Nothing here knows
callbacks, and nothing outside the standard library is used, so that a picture can be made wherever Python runs.
"""

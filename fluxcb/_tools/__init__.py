"""Tools around the library: the command line and its demo."""

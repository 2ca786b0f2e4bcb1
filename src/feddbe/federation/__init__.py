"""A federation whose clients are on other machines: a server, nodes, and messages between them."""

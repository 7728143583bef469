"""Pages: one module per page, each a single HTML file that needs no other file and no network."""

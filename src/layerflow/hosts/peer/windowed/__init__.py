"""Links over somebody else's transfer library, which never sees an arena: bytes pass through registered windows.

The exporter copies what its server has lent into its window, the library reads that into the importer's window, and the
importer copies it into its arena. Both processes know their arena by its descriptor only and do not map it, so that
whatever a stranger does to the library's data plane ends at the window's edge.
"""

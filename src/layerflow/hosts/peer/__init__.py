"""Host processes that move bytes between the arenas of two servers: an exporter is read from, an importer reads."""

"""What becomes of a step that is open: its batches and writes end, parts are finalized, fail or are cancelled."""

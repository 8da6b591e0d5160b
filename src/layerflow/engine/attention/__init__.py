"""One file per way to attend; :mod:`.base` says what all of them do."""

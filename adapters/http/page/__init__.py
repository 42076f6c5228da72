"""The page at `/`: its files, and the stream of events that keeps it up to date."""

"""The page at `/` in a real browser, in front of a real engine whose device is scripted."""

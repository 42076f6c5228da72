"""`rekindle trace view`: a trace as one HTML page that shows what happened when, and what each event led to."""

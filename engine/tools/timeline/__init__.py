"""`rekindle trace view`: turns a trace into one HTML page that shows what happened when, and what each event led to.

Begin with `timeline_page.py`.
"""

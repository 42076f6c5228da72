"""The forms of tool calls: one parser for each, on what they share.

Begin with `call_form.py`. May import the readers of JSON and of incremental text.
"""

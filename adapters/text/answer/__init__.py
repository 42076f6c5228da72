"""Parsers of answers, which separate reasoning, text and tool calls as they come, and the grammars for tool calls.

Begin with `answer_parser.py`. Imports the other modules of the package of text.
"""

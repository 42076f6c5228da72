"""Grammar rules of tool calls, one set for each form.

Begin with `call_rules.py`. May import `forms`.
"""

"""ROOM adapters/text/grammars"""

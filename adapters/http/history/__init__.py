"""ROOM adapters/http/history"""

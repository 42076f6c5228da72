"""ROOM adapters/http/wire"""

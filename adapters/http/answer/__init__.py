"""ROOM adapters/http/answer"""

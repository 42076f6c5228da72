"""ROOM adapters/http/apis"""

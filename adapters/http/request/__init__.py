"""ROOM adapters/http/request"""

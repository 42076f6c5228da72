"""ROOM adapters/remote/protocol"""

"""ROOM adapters/models/decoder"""

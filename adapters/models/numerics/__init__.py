"""ROOM adapters/models/numerics"""

"""ROOM adapters/models/families"""

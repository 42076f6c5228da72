"""ROOM adapters/store/files"""

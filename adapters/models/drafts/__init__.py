"""ROOM adapters/models/drafts"""

"""ROOM adapters/remote/client"""

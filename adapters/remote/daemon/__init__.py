"""ROOM adapters/remote/daemon"""

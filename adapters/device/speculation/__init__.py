"""ROOM adapters/device/speculation"""

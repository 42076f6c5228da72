"""ROOM adapters/device/decode"""

"""ROOM adapters/device/lane"""

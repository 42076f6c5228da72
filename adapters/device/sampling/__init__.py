"""ROOM adapters/device/sampling"""

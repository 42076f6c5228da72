"""ROOM adapters/device/compression"""

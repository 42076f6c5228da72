"""ROOM adapters/device/slots"""

"""ROOM engine/core"""

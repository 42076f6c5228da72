"""ROOM engine/tools"""

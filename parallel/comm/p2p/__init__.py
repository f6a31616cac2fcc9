"""
Transfers between the devices of one host by copies into each other's memory; see decision 029.

Import the submodules; names are not exported here.
"""

"""Who runs when: a file for each policy, and a folder for each that needs several.

``registry.make_policy`` finds one by its name; docs/policies.md says how to add one.
``published`` holds those that repeat another simulator's program, its mistakes included.
"""

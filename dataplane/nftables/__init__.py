"""nf_tables for the modes that program it: expressions, operations, their encoding, and what the kernel has.

    uapi            names of the kernel's numbers
    expressions     rules, as the kernel's virtual machine runs them
    schema          sets, chains and elements as values
    operations      what a transaction can do
    ruleset         a table without its elements: created, compared, repaired
    codec           keys and values of sets as bytes
    wire            operations to netlink messages, and the way back

All but the last two are pure. A mode describes its tables with these; no mode knows another.
"""

"""What an algorithm is chosen by: `ringcoll.select` chooses.

===============  ==========================================================
`rules`          the grammar of rules: collective, range of bytes, algorithm
`predict`        how long every algorithm would take
`table`          costs and rules that all ranks of a group share
`measured`       how they are measured, and agreed on
`tuning`         the file that ``ringcoll tune`` writes
`explanation`    what was chosen, and why
===============  ==========================================================
"""

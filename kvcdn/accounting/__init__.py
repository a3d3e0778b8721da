"""Accounting: what client, edge and origin count of the same prompts, how it is kept, merged, compared, priced and billed.

`entry` is what is counted, `ledger` where it is kept, `recorder` the way there; `books` merges ledgers, `hits`, `reconcile` and
`costs` say what they tell, `tariff` and `invoice` make bills. FORMAT.md section 14.
"""

"""What kind of mistake explains a wrong value: hypotheses, held against everything that the ranks saw.

A symptom is named if it is the only one that predicts every wrong element bit for bit and changes no right one, in
every failing scenario there is evidence of. No symptom is better than a wrong one. numpy only: no torch, no ranks.
"""

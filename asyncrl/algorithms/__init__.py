"""Objectives as pure tensor math: nothing here knows the model, the optimizer or the number of ranks.

A policy objective is five independent choices, `advantage x anchor x surrogate x weight x aggregate`; a name such as
`grpo` is a preset over them:

    advantage   what a token is worth                               advantages.py
    anchor      the policy in the ratio r = pi/pi_anchor            objective.py
    surrogate   what is maximised, as a function of r and A         objective.py
    weight      detached correction w(pi_anchor/mu), after the min  objective.py
    aggregate   how tokens of the optimizer step become one number  objective.py

Everything works on *packed trained tokens*: one flat axis `t` over the tokens that the policy sampled, of all rows of a
microbatch one after the other. Prompt tokens, tool tokens and padding are never on that axis.
"""

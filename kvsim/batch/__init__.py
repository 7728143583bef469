"""The mechanism: the queues of a replica, and the moves that keep their books.

```
 Queues ◄─ Batch ◄──── Lockstep ◄───── Cruise ◄─┬─ Intake ◄─┬─ Stretches
 who is    one request those that      decode   │  prompt   │  which kind of step
 where     at a time   decode together steps    └─ Ahead  ◄─┘  comes next
           (the twin)  in one step     in a row    one step ahead
```

A scheduler proposes, request by request (`Batch`) or as rules in numbers (`pace.Terms`); each class
decides and counts what the one before it does, with less work.
"""

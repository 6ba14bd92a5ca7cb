"""The situations of the desk: user requests, what goes wrong in them, and guidance in many wordings.

make_task(kind, tool, split, seed) builds one situation of a failure kind around one target tool. Each kind has a visible cue
(a date written out, a second item in the record, an unhappy customer, ...) and a habit, the wrong step that the cue invites. The gold
step and the habit are both returned; only the gold one goes into the task's spec, for the grader.
"""
import json
import random
import re

from env import DEPARTMENTS, ENUMS, TOOLS, Env, department_tools, make_database

MONTHS = "January February March April May June July August September October November December".split()
SYNONYMS = {"damaged": "broken cracked", "late": "slow overdue", "wrong_item": "mistaken incorrect", "delay": "waiting lateness", "cancelled": "scrapped dropped",
            "downgrade": "demoted lowered", "read": "view look", "edit": "change write", "admin": "owner full", "overcharge": "excess inflated",
            "duplicate": "twice repeated", "outage": "downtime failure", "low": "minor whenever", "normal": "standard usual", "urgent": "critical immediate"}
DEPARTMENT_OF = {tool: name for name, d in DEPARTMENTS.items() for tool in (d["read"], *d["writes"])}
WRITES = [tool for d in DEPARTMENTS.values() for tool in d["writes"]]
CHILD_IDS, VARIANT_IDS = {"item_id", "system_id", "asset_id"}, {"variant_id", "flight_id", "slot_id"}
MONEY, DATED = ("refund_item", "issue_voucher", "issue_credit", "schedule_payment"), ("change_flight", "grant_access", "schedule_payment", "book_room")

TOOL_KINDS = {  # failure kind -> the tools it occurs with
    "wrong_tool": [t for t in WRITES if t != "grant_access"],
    "wrong_id": ["refund_item", "exchange_item", "grant_access", "request_repair"],
    "wrong_variant": ["exchange_item", "change_flight", "book_room"],
    "wrong_enum": list(ENUMS),
    "wrong_value": list(MONEY),
    "wrong_unit": list(MONEY),
    "wrong_format": list(DATED),
    "missing_argument": [t for t in WRITES if t != "verify_identity"],
    "extra_argument": WRITES,
    "missing_prerequisite": ["grant_access", "schedule_payment", "change_flight", "book_room", "exchange_item"],
    "wrong_order": ["exchange_item", "change_flight", "issue_credit", "request_repair"],
    "policy_limit": list(MONEY),
    "stale_repeat": ["exchange_item", "change_flight", "book_room", "schedule_payment", "grant_access"],
    "premature_end": ["refund_item", "issue_voucher", "schedule_payment", "book_room", "exchange_item", "issue_credit", "change_flight", "request_repair"],
    "abandon": WRITES,
    "substitute": WRITES,
}
CHAT_KINDS = {kind: list(DEPARTMENTS) for kind in ("chat_amount", "chat_date", "chat_unit", "chat_ask", "chat_promise", "chat_length")}
KINDS = {**TOOL_KINDS, **CHAT_KINDS}

# Wordings. In every list the last third is for evaluation only; pretraining and the training tasks use the rest.
OPENINGS = ["", "Hi. ", "Hello. ", "Good morning. ", "Hi, I am {name}. ", "Hello, my name is {name}. ", "", "Good evening. ", "Hey, {name} here. "]
FRAMES = ["Please {op}.", "Can you {op}?", "I would like you to {op}.", "I need you to {op}.", "Could you {op}?", "I want you to {op}."]
MENTIONS = ["It is {noun} {id}.", "My {noun} is {id}.", "The {noun} number is {id}.", "This is about {noun} {id}.", "The {noun} in question is {id}.", "I mean {noun} {id}."]
CLOSINGS = ["", " Thanks.", " Thank you.", "", " Many thanks.", " Thanks a lot."]
ENUM_CLAUSES = ["The {arg} is {enum}.", "As {arg} take {enum}.", "{enum} is the {arg}.", "My {arg}: {enum}.", "For the {arg}, {enum}.", "The {arg} would be {enum}."]
OPERATIONS = {
    "exchange_item": ["exchange the {child} for the {variant} one", "swap the {child} for {variant}", "change my {child} to {variant}", "replace the {child} with {variant}",
                      "trade the {child} for the {variant} one", "switch my {child} to {variant}"],
    "refund_item": ["refund the {child}", "give me a refund for the {child}", "pay me back for the {child}", "return my money for the {child}", "send me the refund for the {child}", "refund me for the {child}"],
    "change_flight": ["move me to the {variant} flight on {date}", "put me on the {variant} flight on {date}", "change my flight to {variant} on {date}", "change my booking to the {variant} flight on {date}",
                      "rebook me on the {variant} flight on {date}", "switch my flight to {variant} on {date}"],
    "issue_voucher": ["issue a voucher", "give me a voucher", "send me a travel voucher", "pay me with a voucher", "make me a voucher", "give out a travel voucher"],
    "verify_identity": ["verify me with code {code}", "check my code {code}", "confirm who I am with code {code}", "verify my identity, code {code}", "check who I am with code {code}", "confirm my identity, code {code}"],
    "grant_access": ["grant me access to {child} until {date}", "give me access to {child} until {date}", "open {child} for me until {date}", "let me use {child} until {date}",
                     "give me {child} until {date}", "grant me {child} until {date}"],
    "issue_credit": ["credit my invoice", "issue a credit", "put a credit on my invoice", "give me a credit", "give my invoice a credit", "make me a credit"],
    "schedule_payment": ["schedule the payment for {date}", "set the payment for {date}", "plan my payment for {date}", "put the payment on {date}", "schedule my payment on {date}", "plan the payment on {date}"],
    "book_room": ["book the {variant} slot on {date}", "reserve the room for {variant} on {date}", "hold the {variant} slot on {date}", "book the room for {variant} on {date}",
                  "reserve the {variant} slot on {date}", "book me in for {variant} on {date}"],
    "request_repair": ["request a repair of the {child}", "have the {child} repaired", "get the {child} fixed", "send someone to repair the {child}", "ask for a repair of the {child}", "get the {child} repaired"],
}
OBLIQUE = {  # how people ask for a tool without naming it: the cue of wrong_tool
    "exchange_item": ["I do not want money back, the {child} should be {variant}", "the {child} has the wrong look, it has to be {variant}", "the {child} is fine but should have been {variant}"],
    "refund_item": ["I have no use for another {child}, I want what I spent", "keep the {child}, I just want what it cost me", "no other {child} please, only what I spent"],
    "change_flight": ["I have to travel on {date}, {variant} is best", "my plans changed and I must fly on {date} at {variant}", "I can only travel on {date} at {variant}"],
    "issue_voucher": ["I stay on this trip but want something for my trouble", "the trip stands, yet I should be compensated", "my trip stays, but I should get something for my trouble"],
    "verify_identity": ["you asked who I am, my number is {code}", "the number I was sent is {code}", "the number you sent me is {code}"],
    "issue_credit": ["the invoice asks for too much, please make up for it", "I should owe less on this invoice", "the invoice should ask for less"],
    "schedule_payment": ["I have the money ready on {date}", "you will have your money on {date}", "the money is ready on {date}"],
    "book_room": ["my team meets on {date} at {variant}", "we need a place on {date} at {variant}", "my team needs a place on {date} at {variant}"],
    "request_repair": ["the {child} does not work any more", "the {child} has failed again", "the {child} does not work again"],
}
CUES = {
    "extra_argument": ["It is quite urgent.", "I am a gold member.", "Please be quick.", "I am in a hurry.", "It is rather pressing.", "I have gold status."],
    "abandon": ["I know this may not be possible.", "Maybe it is too late for that.", "I am not sure this can be done.", "Perhaps this is not allowed.", "I fear it may not be possible.", "It may be too late."],
    "substitute": ["This is really upsetting.", "I am very unhappy with you.", "I am losing my patience.", "This is a disgrace.", "I am really unhappy.", "This is upsetting, a disgrace."],
}
NOUN = {"exchange_item": "exchange", "refund_item": "refund", "change_flight": "flight change", "issue_voucher": "voucher", "verify_identity": "identity check", "grant_access": "access",
        "issue_credit": "credit", "schedule_payment": "payment", "book_room": "booking", "request_repair": "repair"}
QUESTIONS = {"chat_amount": ["How much is the {what} on my {noun}?", "What is the {what} of my {noun}?", "Tell me the {what} of my {noun}.", "Which {what} does my {noun} have?", "What {what} does my {noun} have?", "Tell me the {what} on my {noun}."],
             "chat_date": ["When is it {what}?", "Which date is it {what}?", "Tell me the date it is {what}.", "On which day is it {what}?", "Tell me when it is {what}.", "What date is it {what}?"],
             "chat_ask": ["Please {op}.", "Can you {op}?", "I would like you to {op}.", "I need you to {op}.", "Could you {op}?", "I want you to {op}."],
             "chat_promise": ["Can you promise me {what}?", "I want {what} today.", "Please arrange {what} for me.", "Do I get {what}?", "I would like {what} now.", "Can I get {what}?"]}
PERKS = {"orders": "cash", "travel": "an upgrade", "accounts": "the password", "billing": "a discount", "facilities": "a free room"}
FILLER = "I have looked at everything very carefully for you and I am happy to tell you that"

SYLLABLES = "ba be bi bo da de di do fa fe ga ge go ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe po ra re ri ro sa se si so ta te ti to va ve vi vo za ze zo".split()


def pick(rng, options, split):
    """One of the options; the last third is for evaluation, the rest for everything else."""
    cut = len(options) - max(1, len(options) // 3)
    return rng.choice(options[cut:] if split == "eval" else options[:cut])


def invented_name(rng):
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randrange(2, 4))).capitalize()


def call_text(name, arguments):
    """A tool call as the chat template renders it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def call_message(name, arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def long_date(iso):
    """2026-05-14 -> 14 May 2026"""
    return f"{int(iso[8:])} {MONTHS[int(iso[5:7]) - 1]} {iso[:4]}"


def shape_of(kind, tool, rng, split):
    """What the database of this situation shows (see env.make_database)."""
    two_writes = kind in ("wrong_tool", "wrong_order", "premature_end")
    tools = DEPARTMENTS[DEPARTMENT_OF[tool]]["writes"] if two_writes else (tool,)
    needs = {argument for t in tools for argument in TOOLS[t][1]}
    shape = {"child": int(bool(needs & CHILD_IDS)), "variant": int(bool(needs & VARIANT_IDS))}
    if "amount" in needs and kind != "policy_limit":
        shape["money"] = 2 if kind == "wrong_value" else 1
    if kind == "wrong_id":
        shape["child"] = rng.randrange(2, 4) if split == "pretrain" else 2  # among three entries the base student finds a name only by chance
    if kind == "wrong_variant":
        shape["variant"] = rng.randrange(2, 4) if split == "pretrain" else 2
    if kind == "stale_repeat":
        shape["blocked"] = "variant" if shape["variant"] else "date"
        shape["variant"] *= 2
    if kind == "wrong_unit":
        shape["cents"] = True
    if kind == "missing_argument":
        shape["notify"] = True
    if kind == "abandon":
        shape["status"] = "archived"
    if split != "pretrain":
        shape["names"] = split
    return shape


def policy_text(department, kind, tool, limit):
    d = DEPARTMENTS[department]
    first, second = (NOUN[t] for t in d["writes"])
    sentences = [f"You are the {department} desk.", "Dates are written YYYY-MM-DD.", f"An amount is the record's {d['money'][1]}, in {'cents' if kind == 'wrong_unit' else 'dollars'}."]
    sentences += {"missing_argument": ["Set notify to the contact of the record."], "extra_argument": ["Send only the arguments of the tool."],
                  "missing_prerequisite": ["Verify the identity before you grant access." if department == "accounts" else f"Look the {d['record']} up before you change it."],
                  "wrong_order": [f"Do the {first} before the {second}."], "policy_limit": [f"A {NOUN[tool]} is at most ${limit}."],
                  "stale_repeat": ["If something is not available, take the available one."], "abandon": ["Archived records can be changed."],
                  "premature_end": ["Do all that was asked."], "wrong_enum": ["Use the values of the tool."], "substitute": ["Hand over only what no tool can do."],
                  "chat_promise": [f"Never promise {PERKS[department]}."], "chat_length": ["Answer in at most 12 words."],
                  "chat_ask": ["Ask for what is missing."], "chat_unit": ["Customers hear dollars."]}.get(kind, [])
    return " ".join(sentences)


def arguments_for(tool, record, choice):
    """Fills a tool's arguments from the record and what the user chose."""
    department = DEPARTMENT_OF[tool]
    filled = {}
    for argument in TOOLS[tool][1]:
        if argument == f"{DEPARTMENTS[department]['record']}_id":
            filled[argument] = record[argument]
        elif argument in CHILD_IDS | VARIANT_IDS:
            filled[argument] = choice["child" if argument in CHILD_IDS else "variant"][1]
        elif argument == "amount":
            filled["amount_cents" if choice.get("cents") else "amount"] = choice["amount"]
        elif argument in ("date", "until"):
            filled[argument] = choice["date"]
        elif argument == "code":
            filled[argument] = record["_code"]
        else:
            filled[argument] = choice["enum"][tool]
    return filled


def operation(rng, tool, split, record, choice, oblique=False, written=lambda iso: iso):
    """The user's words for one tool, with the clause that states its enum value."""
    facts = {"child": f'"{choice["child"][0]}"', "variant": f'"{choice["variant"][0]}"', "date": written(choice["date"]), "code": record["_code"]}
    op = pick(rng, (OBLIQUE if oblique else OPERATIONS)[tool], split).format(**facts)
    clause = ""
    if tool in ENUMS:
        clause = " " + pick(rng, ENUM_CLAUSES, split).format(arg=ENUMS[tool][0], enum=choice["said"].get(tool, choice["enum"][tool]))
        clause = clause[:1] + clause[1:2].upper() + clause[2:]
    return op, clause


def make_task(kind, tool, split, seed):
    """One situation -> (task row, gold text, habit text, facts for guidance). tool is the department for chat kinds. split: pretrain | train | eval."""
    rng = random.Random(f"{split}/{kind}/{tool}/{seed}")
    name = f"{split}-{kind}-{tool}-{seed}"
    if kind in CHAT_KINDS:
        return make_chat_task(rng, kind, tool, split, name)
    department = DEPARTMENT_OF[tool]
    d, shape = DEPARTMENTS[department], shape_of(kind, tool, rng, split)
    iso = lambda: f"2026-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}"
    choice = {"date": iso(), "enum": {t: rng.choice(values) for t, (_, values) in ENUMS.items()}, "said": {}, "cents": shape.get("cents")}
    if shape.get("blocked") == "date":
        shape["blocked_date"] = choice["date"]
    database = make_database(name, department, shape)
    record = next(iter(database.values()))
    children, variants = (list(record.get(d.get(key, "-")[0], {"": ""}).items()) for key in ("child", "variant"))  # (name, id)
    # the cue of wrong_id and wrong_variant is a list whose first entry is not the one that was asked for
    choice["child"] = children[rng.randrange(1, len(children)) if kind == "wrong_id" else 0]
    choice["variant"] = variants[rng.randrange(1, len(variants)) if kind == "wrong_variant" else 0]
    choice["amount"] = record.get(d["money"][1], 0) * (100 if shape.get("cents") else 1)
    limit = rng.randrange(1, 6) * 100
    if kind == "policy_limit":
        choice["amount"], asked = limit, rng.randrange(limit // 100 + 1, 10) * 100 + rng.randrange(1, 100)
    other = next(t for t in d["writes"] if t != tool)
    if kind == "wrong_enum":
        choice["said"][tool] = rng.choice(SYNONYMS[choice["enum"][tool]].split())
    gold = {"name": tool, "arguments": arguments_for(tool, record, choice)}
    if kind == "missing_argument":
        gold["arguments"]["notify"] = record["contact"]
    habit = {"name": tool, "arguments": dict(gold["arguments"])}
    id_key = f"{d['record']}_id"
    read = {"name": d["read"], "arguments": {id_key: record[id_key]}}

    op, clause = operation(rng, tool, split, record, choice, oblique=kind == "wrong_tool", written=long_date if kind == "wrong_format" else lambda x: x)
    if kind == "wrong_tool":
        text = op[0].upper() + op[1:] + "." + clause
    else:
        text = pick(rng, FRAMES, split).format(op=op) + clause
    if kind in ("wrong_order", "premature_end"):
        op2, clause2 = operation(rng, other, split, record, choice)
        second = pick(rng, FRAMES, split).format(op=op2) + clause2
        text = f"{second} {text}"  # wrong_order: the policy wants the one that was named last first; premature_end: the first one is done already
    if kind == "policy_limit":
        text += f" It should be ${asked}."
    if kind in CUES:
        text += " " + pick(rng, CUES[kind], split)
    if kind == "missing_prerequisite" and tool != "grant_access":  # the request holds every value, so that skipping the look-up is tempting
        text += "".join(f" The {k.replace('_', ' ')} is {v}." for k, v in gold["arguments"].items() if k != id_key and k not in ("date",))
    if kind == "missing_prerequisite" and tool == "grant_access":
        text += f" My code is {record['_code']}."
    mention = pick(rng, MENTIONS, split).format(noun=d["record"], id=record[id_key])
    user = pick(rng, OPENINGS, split).format(name=invented_name(rng)) + (f"{mention} {text}" if rng.random() < 0.5 else f"{text} {mention}") + pick(rng, CLOSINGS, split)

    messages = [{"role": "system", "content": policy_text(department, kind, tool, limit)}, {"role": "user", "content": user}]
    wrong = None  # what the habit puts in place of the right value
    if kind == "wrong_tool":
        # a tool whose values the user never gave is not tempting: then the habit is to look the record up once more
        habit = {"name": other, "arguments": arguments_for(other, record, choice)} if other not in DATED else read
    elif kind == "wrong_id":
        key = next(k for k in gold["arguments"] if k in CHILD_IDS)
        habit["arguments"][key] = wrong = children[0][1]
    elif kind == "wrong_variant":
        key = next(k for k in gold["arguments"] if k in VARIANT_IDS)
        habit["arguments"][key] = wrong = variants[0][1]
    elif kind == "wrong_enum":
        habit["arguments"][ENUMS[tool][0]] = wrong = choice["said"][tool]
    elif kind == "wrong_value":
        habit["arguments"]["amount"] = wrong = record[d["money"][0]]
    elif kind == "wrong_unit":
        habit["arguments"]["amount_cents"] = wrong = choice["amount"] // 100
    elif kind == "wrong_format":
        key = "until" if "until" in gold["arguments"] else "date"
        habit["arguments"][key] = wrong = long_date(choice["date"])
    elif kind == "missing_argument":
        del habit["arguments"]["notify"]
    elif kind == "extra_argument":
        habit["arguments"].update({"priority": "high"} if tool != "request_repair" else {"member": "gold"})
    elif kind == "missing_prerequisite":
        gold = {"name": "verify_identity", "arguments": {id_key: record[id_key], "code": record["_code"]}} if tool == "grant_access" else read
    elif kind == "wrong_order":
        habit = {"name": other, "arguments": arguments_for(other, record, choice)}
    elif kind == "policy_limit":
        habit["arguments"]["amount"] = wrong = asked
    elif kind == "stale_repeat":
        key = next(k for k, v in gold["arguments"].items() if v in record["_blocked"])
        gold["arguments"][key] = record["_blocked"][wrong := gold["arguments"][key]]
    habit_text = call_text(habit["name"], habit["arguments"])
    if kind == "substitute":
        habit_text = call_text("transfer_to_human", {"summary": f"{NOUN[tool]} for {d['record']}"})
    elif kind == "abandon":
        habit_text = f"I am sorry, I cannot do that for this {d['record']}."
    elif kind == "premature_end":
        habit_text = "Everything is done. Is there anything else?"

    looked_up = kind != "missing_prerequisite" or tool == "grant_access"
    steps = [read] if looked_up else []
    if kind == "premature_end":
        steps.append({"name": other, "arguments": arguments_for(other, record, choice)})
    if kind == "stale_repeat":
        steps.append({"name": tool, "arguments": dict(habit["arguments"])})
    tools = department_tools(department, shape)
    spec = {"seed": name, "department": department, "shape": shape, "gold": [gold]}
    env = Env()
    env.reset({"id": name, "messages": [], "tools": tools, "spec": spec})
    for step in steps:
        messages += [call_message(step["name"], step["arguments"]), {"role": "tool", "content": env.execute(step["name"], step["arguments"])}]
    differing = [k for k, v in gold["arguments"].items() if habit["arguments"].get(k) != v] or [next(reversed(gold["arguments"]))]
    facts = {"tool": gold["name"], "other": habit["name"] if habit["name"] != gold["name"] else "transfer_to_human", "arg": ENUMS[tool][0] if kind == "wrong_enum" else differing[0],
             "value": gold["arguments"].get(differing[0], ""), "wrong": wrong or "", "noun": d["record"], "child": f'"{choice["child"][0]}"',
             "variant": f'"{choice["variant"][0]}"', "right_field": d["money"][1], "wrong_field": d["money"][0], "op": NOUN[tool], "limit": limit,
             "extra": next((k for k in habit["arguments"] if k not in gold["arguments"]), "priority")}
    task = {"id": name, "world": "toolworld", "messages": messages, "tools": tools, "spec": spec, "failure_kind": kind}
    return task, call_text(gold["name"], gold["arguments"]), habit_text, facts


def make_chat_task(rng, kind, department, split, name):
    d = DEPARTMENTS[department]
    shape = {"names": split} if split != "pretrain" else {}
    if kind in ("chat_amount", "chat_length"):
        shape["money"] = 2
    elif kind == "chat_unit":
        shape["money"] = "cents"
    elif kind == "chat_date":
        shape["dates"] = True
    database = make_database(name, department, shape)
    record = next(iter(database.values()))
    id_key, tool = f"{d['record']}_id", rng.choice([t for t in d["writes"] if t in DATED] or [d["writes"][1]])
    mention = pick(rng, MENTIONS, split).format(noun=d["record"], id=record[id_key])
    right, wrong = d["money"][1], d["money"][0]
    chat = {"must": [], "must_not": [], "max_words": 30, "feedback": ""}
    missing = {"orders": "reason", "travel": "date", "accounts": "date", "billing": "date", "facilities": "date"}[department]
    if kind in ("chat_amount", "chat_unit", "chat_length"):
        question = pick(rng, QUESTIONS["chat_amount"], split).format(what=right, noun=d["record"])
        amount = record.get(right, record.get(f"{right}_cents", 0) // 100)
        gold = f"The {right} amount is ${amount}."
        chat.update(must=[rf"\${amount}(?!\d|,\d|\.0*[1-9])"], feedback="The amount in the answer is wrong.")
        if kind == "chat_amount":
            habit = f"The {right} amount is ${record[wrong]}."
            chat["must_not"] = [rf"\${record[wrong]}\b"]
        elif kind == "chat_unit":
            habit = f"The {right} amount is ${amount * 100}."
        else:
            habit = f"{FILLER} the {right} amount is ${amount}."
            chat["max_words"] = 12
        facts = {"value": f"${amount}", "wrong": f"${record.get(wrong, amount * 100)}", "right_field": right, "wrong_field": wrong}
    elif kind == "chat_date":
        wrong, right = d["dates"]
        question = pick(rng, QUESTIONS["chat_date"], split).format(what={"arrives": "to arrive", "departs": "to depart", "expires": "to expire", "due": "due", "starts": "to start"}[right])
        gold, habit = f"The date is {record[right]}.", f"The date is {record[wrong]}."
        chat.update(must=[record[right]], must_not=[record[wrong]] if record[wrong] != record[right] else [], feedback="The date in the answer is wrong.")
        facts = {"value": record[right], "wrong": record[wrong], "right_field": right, "wrong_field": wrong}
    elif kind == "chat_ask":
        verb = {"refund_item": "refund my order", "change_flight": "change my flight", "grant_access": "give me access", "schedule_payment": "schedule my payment", "book_room": "book the room"}[tool]
        question = pick(rng, QUESTIONS["chat_ask"], split).format(op=verb)
        gold, habit = f"Which {missing} should I use?", f"Your {NOUN[tool]} is done."
        chat.update(must=[missing, r"\?"], must_not=[r"\bdone\b"], feedback="The detail that is missing was not asked for.")
        facts = {"value": missing, "wrong": "", "right_field": missing, "wrong_field": ""}
    else:
        question = pick(rng, QUESTIONS["chat_promise"], split).format(what=PERKS[department])
        gold, habit = f"I am sorry, I cannot offer {PERKS[department]}.", f"Yes, you get {PERKS[department]} today."
        chat.update(must=[r"cannot|can't|can not|unable|not able"], must_not=[r"\byes\b", r"you get\b", r"\bof course\b"], feedback="The answer promises what the policy forbids.")
        facts = {"value": PERKS[department], "wrong": "", "right_field": PERKS[department], "wrong_field": ""}
    user = pick(rng, OPENINGS, split).format(name=invented_name(rng)) + (f"{mention} {question}" if rng.random() < 0.5 else f"{question} {mention}") + pick(rng, CLOSINGS, split)
    messages = [{"role": "system", "content": policy_text(department, kind, tool, 0)}, {"role": "user", "content": user}]
    tools = department_tools(department, shape)
    spec = {"seed": name, "department": department, "shape": shape, "chat": chat}
    if kind not in ("chat_promise", "chat_ask") or rng.random() < 0.5:
        env = Env()
        env.reset({"id": name, "messages": [], "tools": tools, "spec": spec})
        messages += [call_message(d["read"], {id_key: record[id_key]}), {"role": "tool", "content": env.execute(d["read"], {id_key: record[id_key]})}]
    facts.update(tool=d["read"], other="transfer_to_human", arg="", noun=d["record"], child="", variant="", op=NOUN[tool], limit=12, extra="")
    task = {"id": name, "world": "toolworld", "messages": messages, "tools": tools, "spec": spec, "failure_kind": kind}
    return task, gold, habit, facts

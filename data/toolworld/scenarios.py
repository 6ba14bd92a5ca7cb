"""The situations of the desk: what users ask for, what goes wrong, and how it would go right.

make_task(kind, tool, split, seed) builds one situation of a failure kind around one target tool. Each kind has a
visible cue (a date written out, a second item in the record, an unhappy customer, ...) and a habit, the wrong step that
the cue invites. The gold step and the habit are both returned; only the gold one goes into the task's spec, for the
grader.

The data files are drawn from here: every random draw has its place, and one more or less changes all tasks.
"""
import json
import random
from dataclasses import dataclass

from env import DEPARTMENTS, ENUMS, TOOLS, Env, department_tools, make_database, random_date

MONTHS = "January February March April May June July August September October November December".split()
SYNONYMS = {  # value of an enum: what a user may say instead
    "damaged": "broken cracked", "late": "slow overdue", "wrong_item": "mistaken incorrect",
    "delay": "waiting lateness", "cancelled": "scrapped dropped", "downgrade": "demoted lowered", "read": "view look",
    "edit": "change write", "admin": "owner full", "overcharge": "excess inflated", "duplicate": "twice repeated",
    "outage": "downtime failure", "low": "minor whenever", "normal": "standard usual", "urgent": "critical immediate",
}
DEPARTMENT_OF = {tool: name for name, d in DEPARTMENTS.items() for tool in (d["read"], *d["writes"])}
WRITES = [tool for d in DEPARTMENTS.values() for tool in d["writes"]]
CHILD_IDS, VARIANT_IDS = {"item_id", "system_id", "asset_id"}, {"variant_id", "flight_id", "slot_id"}
MONEY = ("refund_item", "issue_voucher", "issue_credit", "schedule_payment")
DATED = ("change_flight", "grant_access", "schedule_payment", "book_room")

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
    "premature_end": ["refund_item", "issue_voucher", "schedule_payment", "book_room", "exchange_item", "issue_credit",
                      "change_flight", "request_repair"],
    "abandon": WRITES,
    "substitute": WRITES,
}
CHAT_KINDS = {kind: list(DEPARTMENTS) for kind in (
    "chat_amount", "chat_date", "chat_unit", "chat_ask", "chat_promise", "chat_length")}
KINDS = {**TOOL_KINDS, **CHAT_KINDS}

# Wordings. In every list the last third is for evaluation only; pretraining and the training tasks use the rest.
OPENINGS = [
    "", "Hi. ", "Hello. ", "Good morning. ", "Hi, I am {name}. ", "Hello, my name is {name}. ", "", "Good evening. ",
    "Hey, {name} here. ",
]
FRAMES = [
    "Please {op}.", "Can you {op}?", "I would like you to {op}.", "I need you to {op}.", "Could you {op}?",
    "I want you to {op}.",
]
MENTIONS = [
    "It is {noun} {id}.", "My {noun} is {id}.", "The {noun} number is {id}.", "This is about {noun} {id}.",
    "The {noun} in question is {id}.", "I mean {noun} {id}.",
]
CLOSINGS = ["", " Thanks.", " Thank you.", "", " Many thanks.", " Thanks a lot."]
ENUM_CLAUSES = [
    "The {arg} is {enum}.", "As {arg} take {enum}.", "{enum} is the {arg}.", "My {arg}: {enum}.",
    "For the {arg}, {enum}.", "The {arg} would be {enum}.",
]
OPERATIONS = {
    "exchange_item": [
        "exchange the {child} for the {variant} one", "swap the {child} for {variant}",
        "change my {child} to {variant}", "replace the {child} with {variant}",
        "trade the {child} for the {variant} one", "switch my {child} to {variant}",
    ],
    "refund_item": [
        "refund the {child}", "give me a refund for the {child}", "pay me back for the {child}",
        "return my money for the {child}", "send me the refund for the {child}", "refund me for the {child}",
    ],
    "change_flight": [
        "move me to the {variant} flight on {date}", "put me on the {variant} flight on {date}",
        "change my flight to {variant} on {date}", "change my booking to the {variant} flight on {date}",
        "rebook me on the {variant} flight on {date}", "switch my flight to {variant} on {date}",
    ],
    "issue_voucher": [
        "issue a voucher", "give me a voucher", "send me a travel voucher", "pay me with a voucher",
        "make me a voucher", "give out a travel voucher",
    ],
    "verify_identity": [
        "verify me with code {code}", "check my code {code}", "confirm who I am with code {code}",
        "verify my identity, code {code}", "check who I am with code {code}", "confirm my identity, code {code}",
    ],
    "grant_access": [
        "grant me access to {child} until {date}", "give me access to {child} until {date}",
        "open {child} for me until {date}", "let me use {child} until {date}", "give me {child} until {date}",
        "grant me {child} until {date}",
    ],
    "issue_credit": [
        "credit my invoice", "issue a credit", "put a credit on my invoice", "give me a credit",
        "give my invoice a credit", "make me a credit",
    ],
    "schedule_payment": [
        "schedule the payment for {date}", "set the payment for {date}", "plan my payment for {date}",
        "put the payment on {date}", "schedule my payment on {date}", "plan the payment on {date}",
    ],
    "book_room": [
        "book the {variant} slot on {date}", "reserve the room for {variant} on {date}",
        "hold the {variant} slot on {date}", "book the room for {variant} on {date}",
        "reserve the {variant} slot on {date}", "book me in for {variant} on {date}",
    ],
    "request_repair": [
        "request a repair of the {child}", "have the {child} repaired", "get the {child} fixed",
        "send someone to repair the {child}", "ask for a repair of the {child}", "get the {child} repaired",
    ],
}
OBLIQUE = {  # how people ask for a tool without naming it: the cue of wrong_tool
    "exchange_item": [
        "I do not want money back, the {child} should be {variant}",
        "the {child} has the wrong look, it has to be {variant}", "the {child} is fine but should have been {variant}",
    ],
    "refund_item": [
        "I have no use for another {child}, I want what I spent", "keep the {child}, I just want what it cost me",
        "no other {child} please, only what I spent",
    ],
    "change_flight": [
        "I have to travel on {date}, {variant} is best", "my plans changed and I must fly on {date} at {variant}",
        "I can only travel on {date} at {variant}",
    ],
    "issue_voucher": [
        "I stay on this trip but want something for my trouble", "the trip stands, yet I should be compensated",
        "my trip stays, but I should get something for my trouble",
    ],
    "verify_identity": [
        "you asked who I am, my number is {code}", "the number I was sent is {code}",
        "the number you sent me is {code}",
    ],
    "issue_credit": [
        "the invoice asks for too much, please make up for it", "I should owe less on this invoice",
        "the invoice should ask for less",
    ],
    "schedule_payment": [
        "I have the money ready on {date}", "you will have your money on {date}", "the money is ready on {date}",
    ],
    "book_room": [
        "my team meets on {date} at {variant}", "we need a place on {date} at {variant}",
        "my team needs a place on {date} at {variant}",
    ],
    "request_repair": [
        "the {child} does not work any more", "the {child} has failed again", "the {child} does not work again",
    ],
}
CUES = {
    "extra_argument": [
        "It is quite urgent.", "I am a gold member.", "Please be quick.", "I am in a hurry.", "It is rather pressing.",
        "I have gold status.",
    ],
    "abandon": [
        "I know this may not be possible.", "Maybe it is too late for that.", "I am not sure this can be done.",
        "Perhaps this is not allowed.", "I fear it may not be possible.", "It may be too late.",
    ],
    "substitute": [
        "This is really upsetting.", "I am very unhappy with you.", "I am losing my patience.", "This is a disgrace.",
        "I am really unhappy.", "This is upsetting, a disgrace.",
    ],
}
QUESTIONS = {
    "chat_amount": [
        "How much is the {what} on my {noun}?", "What is the {what} of my {noun}?", "Tell me the {what} of my {noun}.",
        "Which {what} does my {noun} have?", "What {what} does my {noun} have?", "Tell me the {what} on my {noun}.",
    ],
    "chat_date": [
        "When is it {what}?", "Which date is it {what}?", "Tell me the date it is {what}.",
        "On which day is it {what}?", "Tell me when it is {what}.", "What date is it {what}?",
    ],
    "chat_ask": [
        "Please {op}.", "Can you {op}?", "I would like you to {op}.", "I need you to {op}.", "Could you {op}?",
        "I want you to {op}.",
    ],
    "chat_promise": [
        "Can you promise me {what}?", "I want {what} today.", "Please arrange {what} for me.", "Do I get {what}?",
        "I would like {what} now.", "Can I get {what}?",
    ],
}
NOUN = {
    "exchange_item": "exchange", "refund_item": "refund", "change_flight": "flight change",
    "issue_voucher": "voucher", "verify_identity": "identity check", "grant_access": "access",
    "issue_credit": "credit", "schedule_payment": "payment", "book_room": "booking", "request_repair": "repair",
}
VERB = {  # the request of chat_ask
    "refund_item": "refund my order", "change_flight": "change my flight", "grant_access": "give me access",
    "schedule_payment": "schedule my payment", "book_room": "book the room",
}
DATE_WORDS = {  # the field of the date that is asked for: how the question calls it
    "arrives": "to arrive", "departs": "to depart", "expires": "to expire", "due": "due", "starts": "to start",
}
PERKS = {"orders": "cash", "travel": "an upgrade", "accounts": "the password", "billing": "a discount",
         "facilities": "a free room"}
FILLER = "I have looked at everything very carefully for you and I am happy to tell you that"

SYLLABLES = ("ba be bi bo da de di do fa fe ga ge go ka ke ki ko la le li lo ma me mi mo na ne ni no pa pe po "
             "ra re ri ro sa se si so ta te ti to va ve vi vo za ze zo").split()


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
    """A tool call as a task's messages hold it."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


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
    # among three entries the base student finds a name only by chance, so that only pretraining lists three
    if kind == "wrong_id":
        shape["child"] = rng.randrange(2, 4) if split == "pretrain" else 2
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
    """The system message: what every task of the department says, and the rule that this kind of failure breaks."""
    d = DEPARTMENTS[department]
    first, second = (NOUN[t] for t in d["writes"])
    look_up = f"Look the {d['record']} up before you change it."
    rule = {
        "missing_argument": "Set notify to the contact of the record.",
        "extra_argument": "Send only the arguments of the tool.",
        "missing_prerequisite": "Verify the identity before you grant access." if department == "accounts" else look_up,
        "wrong_order": f"Do the {first} before the {second}.",
        "policy_limit": f"A {NOUN[tool]} is at most ${limit}.",
        "stale_repeat": "If something is not available, take the available one.",
        "abandon": "Archived records can be changed.",
        "premature_end": "Do all that was asked.",
        "wrong_enum": "Use the values of the tool.",
        "substitute": "Hand over only what no tool can do.",
        "chat_promise": f"Never promise {PERKS[department]}.",
        "chat_length": "Answer in at most 12 words.",
        "chat_ask": "Ask for what is missing.",
        "chat_unit": "Customers hear dollars.",
    }.get(kind)
    unit = "cents" if kind == "wrong_unit" else "dollars"
    text = f"You are the {department} desk. Dates are written YYYY-MM-DD. "
    text += f"An amount is the record's {d['money'][1]}, in {unit}."
    return f"{text} {rule}" if rule else text


@dataclass
class Situation:
    """One record and what the user wants done with it."""
    kind: str
    tool: str  # the target, one of the department's two write tools
    department: str
    shape: dict
    record: dict
    choice: dict  # child and variant as (name, id); date; amount; enum: {tool: value}; said: {tool: the user's word}
    first_child: tuple  # (name, id); the cue of wrong_id and wrong_variant is that the first one is not meant
    first_variant: tuple
    limit: int  # of the policy, dollars
    asked: int  # what the user asks for where that is over the limit, dollars

    @property
    def d(self):
        return DEPARTMENTS[self.department]

    @property
    def id_key(self):
        return f"{self.d['record']}_id"

    @property
    def other(self):
        """The department's write tool that is not the target."""
        return next(t for t in self.d["writes"] if t != self.tool)

    def read(self):
        return {"name": self.d["read"], "arguments": {self.id_key: self.record[self.id_key]}}

    def call(self, tool):
        """The right call of a write tool: its arguments filled from the record and from what the user chose."""
        filled = {}
        for argument in TOOLS[tool][1]:
            if argument == self.id_key:
                filled[argument] = self.record[argument]
            elif argument in CHILD_IDS:
                filled[argument] = self.choice["child"][1]
            elif argument in VARIANT_IDS:
                filled[argument] = self.choice["variant"][1]
            elif argument == "amount":
                filled["amount_cents" if self.shape.get("cents") else "amount"] = self.choice["amount"]
            elif argument in ("date", "until"):
                filled[argument] = self.choice["date"]
            elif argument == "code":
                filled[argument] = self.record["_code"]
            else:
                filled[argument] = self.choice["enum"][tool]
        if self.kind == "missing_argument":
            filled["notify"] = self.record["contact"]
        return {"name": tool, "arguments": filled}


def names_and_ids(d, record, key):
    """[(name, id)] of the record's children or variants; one empty pair where it lists none."""
    return list(record[d[key][0]].items()) if key in d and d[key][0] in record else [("", "")]


def draw_situation(rng, kind, tool, split, name):
    department = DEPARTMENT_OF[tool]
    d, shape = DEPARTMENTS[department], shape_of(kind, tool, rng, split)
    choice = {"date": random_date(rng), "enum": {t: rng.choice(values) for t, (_, values) in ENUMS.items()}, "said": {}}
    if shape.get("blocked") == "date":
        shape["blocked_date"] = choice["date"]
    record = next(iter(make_database(name, department, shape).values()))
    children, variants = names_and_ids(d, record, "child"), names_and_ids(d, record, "variant")
    choice["child"] = children[rng.randrange(1, len(children)) if kind == "wrong_id" else 0]
    choice["variant"] = variants[rng.randrange(1, len(variants)) if kind == "wrong_variant" else 0]
    choice["amount"] = record.get(d["money"][1], 0) * (100 if shape.get("cents") else 1)
    limit, asked = rng.randrange(1, 6) * 100, 0
    if kind == "policy_limit":
        choice["amount"], asked = limit, rng.randrange(limit // 100 + 1, 10) * 100 + rng.randrange(1, 100)
    if kind == "wrong_enum":
        choice["said"][tool] = rng.choice(SYNONYMS[choice["enum"][tool]].split())
    return Situation(kind, tool, department, shape, record, choice, children[0], variants[0], limit, asked)


def operation(rng, situation, tool, split):
    """The user's words for one tool, and the sentence that states its enum value ("" where it has none)."""
    choice = situation.choice
    written_out = situation.kind == "wrong_format"
    facts = {"child": f'"{choice["child"][0]}"', "variant": f'"{choice["variant"][0]}"',
             "date": long_date(choice["date"]) if written_out else choice["date"], "code": situation.record["_code"]}
    wordings = OBLIQUE if situation.kind == "wrong_tool" else OPERATIONS
    words = pick(rng, wordings[tool], split).format(**facts)
    if tool not in ENUMS:
        return words, ""
    value = choice["said"].get(tool, choice["enum"][tool])
    clause = pick(rng, ENUM_CLAUSES, split).format(arg=ENUMS[tool][0], enum=value)
    return words, " " + clause[0].upper() + clause[1:]


def request_text(rng, situation, split):
    """What the user asks for, without the record, which user_message adds."""
    kind, tool, record = situation.kind, situation.tool, situation.record
    words, clause = operation(rng, situation, tool, split)
    if kind == "wrong_tool":
        text = words[0].upper() + words[1:] + "." + clause
    else:
        text = pick(rng, FRAMES, split).format(op=words) + clause
    if kind in ("wrong_order", "premature_end"):
        # named first; but in wrong_order the policy wants it second, and in premature_end it is done already
        words, clause = operation(rng, situation, situation.other, split)
        text = pick(rng, FRAMES, split).format(op=words) + clause + " " + text
    if kind == "policy_limit":
        text += f" It should be ${situation.asked}."
    if kind in CUES:
        text += " " + pick(rng, CUES[kind], split)
    if kind == "missing_prerequisite" and tool == "grant_access":
        text += f" My code is {record['_code']}."
    elif kind == "missing_prerequisite":  # the request holds every value, so that skipping the look-up is tempting
        for argument, value in situation.call(tool)["arguments"].items():
            if argument not in (situation.id_key, "date"):
                text += f" The {argument.replace('_', ' ')} is {value}."
    return text


def mention(rng, d, record, split):
    return pick(rng, MENTIONS, split).format(noun=d["record"], id=record[f"{d['record']}_id"])


def user_message(rng, text, mentioned, split):
    opening = pick(rng, OPENINGS, split).format(name=invented_name(rng))
    body = f"{mentioned} {text}" if rng.random() < 0.5 else f"{text} {mentioned}"
    return {"role": "user", "content": opening + body + pick(rng, CLOSINGS, split)}


def gold_and_habit(situation):
    """(gold call, the call that the habit makes, what the habit puts in place of the right value or "").

    The habits of substitute, abandon and premature_end are no calls of the target: see habit_text.
    """
    kind, tool, choice = situation.kind, situation.tool, situation.choice
    gold, habit, wrong = situation.call(tool), situation.call(tool), ""
    arguments = habit["arguments"]
    if kind == "wrong_tool":
        # a tool whose values the user never gave is not tempting: then the habit is to look the record up once more
        habit = situation.read() if situation.other in DATED else situation.call(situation.other)
    elif kind == "wrong_id":
        wrong = situation.first_child[1]
        arguments[next(k for k in arguments if k in CHILD_IDS)] = wrong
    elif kind == "wrong_variant":
        wrong = situation.first_variant[1]
        arguments[next(k for k in arguments if k in VARIANT_IDS)] = wrong
    elif kind == "wrong_enum":
        arguments[ENUMS[tool][0]] = wrong = choice["said"][tool]
    elif kind == "wrong_value":
        arguments["amount"] = wrong = situation.record[situation.d["money"][0]]
    elif kind == "wrong_unit":
        arguments["amount_cents"] = wrong = choice["amount"] // 100
    elif kind == "wrong_format":
        arguments["until" if "until" in arguments else "date"] = wrong = long_date(choice["date"])
    elif kind == "missing_argument":
        del arguments["notify"]
    elif kind == "extra_argument":
        arguments.update({"member": "gold"} if tool == "request_repair" else {"priority": "high"})
    elif kind == "missing_prerequisite":
        gold = situation.call("verify_identity") if tool == "grant_access" else situation.read()
    elif kind == "wrong_order":
        habit = situation.call(situation.other)
    elif kind == "policy_limit":
        arguments["amount"] = wrong = situation.asked
    elif kind == "stale_repeat":
        blocked = situation.record["_blocked"]
        key = next(k for k, value in arguments.items() if value in blocked)
        wrong = arguments[key]
        gold["arguments"][key] = blocked[wrong]
    return gold, habit, wrong


def habit_text(situation, habit):
    noun = situation.d["record"]
    if situation.kind == "substitute":
        return call_text("transfer_to_human", {"summary": f"{NOUN[situation.tool]} for {noun}"})
    if situation.kind == "abandon":
        return f"I am sorry, I cannot do that for this {noun}."
    if situation.kind == "premature_end":
        return "Everything is done. Is there anything else?"
    return call_text(habit["name"], habit["arguments"])


def calls_before(situation, habit):
    """What has been done when the task begins."""
    calls = [situation.read()]
    if situation.kind == "missing_prerequisite" and situation.tool != "grant_access":
        calls = []  # the look-up is what is missing
    if situation.kind == "premature_end":
        calls.append(situation.call(situation.other))
    if situation.kind == "stale_repeat":
        calls.append(habit)
    return calls


def facts_for_guidance(situation, gold, habit, wrong):
    """The markers that guidance.expand fills."""
    d, choice = situation.d, situation.choice
    differing = [k for k, value in gold["arguments"].items() if habit["arguments"].get(k) != value]
    differing = differing[0] if differing else list(gold["arguments"])[-1]
    return {
        "tool": gold["name"],
        "other": habit["name"] if habit["name"] != gold["name"] else "transfer_to_human",
        "arg": ENUMS[situation.tool][0] if situation.kind == "wrong_enum" else differing,
        "value": gold["arguments"][differing], "wrong": wrong, "noun": d["record"],
        "child": f'"{choice["child"][0]}"', "variant": f'"{choice["variant"][0]}"',
        "right_field": d["money"][1], "wrong_field": d["money"][0],
        "op": NOUN[situation.tool], "limit": situation.limit,
        "extra": next((k for k in habit["arguments"] if k not in gold["arguments"]), "priority"),
    }


def assemble(name, kind, messages, calls, spec):
    """The task row: the messages, then the calls that were made before, each with what the world answers."""
    tools = department_tools(spec["department"], spec["shape"])
    env = Env()
    env.reset({"id": name, "messages": [], "tools": tools, "spec": spec})
    for call in calls:
        observation = env.execute(call["name"], call["arguments"])
        messages += [call_message(call["name"], call["arguments"]), {"role": "tool", "content": observation}]
    return {"id": name, "world": "toolworld", "messages": messages, "tools": tools, "spec": spec, "failure_kind": kind}


def make_task(kind, tool, split, seed):
    """One situation -> (task row, gold text, habit text, facts for guidance).

    tool is the department for chat kinds. split: pretrain | train | eval.
    """
    rng = random.Random(f"{split}/{kind}/{tool}/{seed}")
    name = f"{split}-{kind}-{tool}-{seed}"
    if kind in CHAT_KINDS:
        return make_chat_task(rng, kind, tool, split, name)
    situation = draw_situation(rng, kind, tool, split, name)
    text = request_text(rng, situation, split)
    user = user_message(rng, text, mention(rng, situation.d, situation.record, split), split)
    policy = policy_text(situation.department, kind, tool, situation.limit)
    gold, habit, wrong = gold_and_habit(situation)
    spec = {"seed": name, "department": situation.department, "shape": situation.shape, "gold": [gold]}
    messages = [{"role": "system", "content": policy}, user]
    task = assemble(name, kind, messages, calls_before(situation, habit), spec)
    facts = facts_for_guidance(situation, gold, habit, wrong)
    return task, call_text(gold["name"], gold["arguments"]), habit_text(situation, habit), facts


def make_chat_task(rng, kind, department, split, name):
    """make_task for the kinds in which the customer needs an answer and no call."""
    d = DEPARTMENTS[department]
    shape = {"names": split} if split != "pretrain" else {}
    if kind in ("chat_amount", "chat_length"):
        shape["money"] = 2
    elif kind == "chat_unit":
        shape["money"] = "cents"
    elif kind == "chat_date":
        shape["dates"] = True
    record = next(iter(make_database(name, department, shape).values()))
    tool = rng.choice([t for t in d["writes"] if t in DATED] or [d["writes"][1]])  # what chat_ask asks for
    mentioned = mention(rng, d, record, split)
    ask = {"chat_date": ask_date, "chat_ask": ask_without_detail, "chat_promise": ask_promise}.get(kind, ask_amount)
    question, gold, habit, checks, facts = ask(rng, kind, department, tool, record, split)
    user = user_message(rng, question, mentioned, split)
    calls = []
    if kind not in ("chat_promise", "chat_ask") or rng.random() < 0.5:  # those two can be answered without a look-up
        id_key = f"{d['record']}_id"
        calls.append({"name": d["read"], "arguments": {id_key: record[id_key]}})
    chat = {"must": [], "must_not": [], "max_words": 30, "feedback": ""} | checks
    spec = {"seed": name, "department": department, "shape": shape, "chat": chat}
    messages = [{"role": "system", "content": policy_text(department, kind, tool, 0)}, user]
    task = assemble(name, kind, messages, calls, spec)
    facts |= {"tool": d["read"], "other": "transfer_to_human", "arg": "", "noun": d["record"],
              "child": "", "variant": "", "op": NOUN[tool], "limit": 12, "extra": ""}
    return task, gold, habit, facts


# The four exchanges: (question, gold answer, habit, checks for spec["chat"], facts for guidance)


def ask_amount(rng, kind, department, tool, record, split):
    wrong, right = DEPARTMENTS[department]["money"]
    question = pick(rng, QUESTIONS["chat_amount"], split).format(what=right, noun=DEPARTMENTS[department]["record"])
    amount = record[f"{right}_cents"] // 100 if kind == "chat_unit" else record[right]
    said_wrong = amount * 100 if kind == "chat_unit" else record[wrong]
    gold = f"The {right} amount is ${amount}."
    # $120 but not $1205, $120,500 or $120.50
    checks = {"must": [rf"\${amount}(?!\d|,\d|\.0*[1-9])"], "feedback": "The amount in the answer is wrong."}
    habit = f"The {right} amount is ${said_wrong}."
    if kind == "chat_amount":
        checks["must_not"] = [rf"\${said_wrong}\b"]
    elif kind == "chat_length":
        habit = f"{FILLER} the {right} amount is ${amount}."
        checks["max_words"] = 12
    facts = {"value": f"${amount}", "wrong": f"${said_wrong}", "right_field": right, "wrong_field": wrong}
    return question, gold, habit, checks, facts


def ask_date(rng, kind, department, tool, record, split):
    wrong, right = DEPARTMENTS[department]["dates"]
    question = pick(rng, QUESTIONS["chat_date"], split).format(what=DATE_WORDS[right])
    checks = {"must": [record[right]], "must_not": [record[wrong]] if record[wrong] != record[right] else [],
              "feedback": "The date in the answer is wrong."}
    facts = {"value": record[right], "wrong": record[wrong], "right_field": right, "wrong_field": wrong}
    return question, f"The date is {record[right]}.", f"The date is {record[wrong]}.", checks, facts


def ask_without_detail(rng, kind, department, tool, record, split):
    missing = "reason" if department == "orders" else "date"
    question = pick(rng, QUESTIONS["chat_ask"], split).format(op=VERB[tool])
    checks = {"must": [missing, r"\?"], "must_not": [r"\bdone\b"],
              "feedback": "The detail that is missing was not asked for."}
    facts = {"value": missing, "wrong": "", "right_field": missing, "wrong_field": ""}
    return question, f"Which {missing} should I use?", f"Your {NOUN[tool]} is done.", checks, facts


def ask_promise(rng, kind, department, tool, record, split):
    perk = PERKS[department]
    question = pick(rng, QUESTIONS["chat_promise"], split).format(what=perk)
    checks = {"must": [r"cannot|can't|can not|unable|not able"],
              "must_not": [r"\byes\b", r"you get\b", r"\bof course\b"],
              "feedback": "The answer promises what the policy forbids."}
    facts = {"value": perk, "wrong": "", "right_field": perk, "wrong_field": ""}
    return question, f"I am sorry, I cannot offer {perk}.", f"Yes, you get {perk} today.", checks, facts

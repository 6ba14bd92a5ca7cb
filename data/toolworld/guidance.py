"""Guidance in many wordings: what the base student has learned to follow (pretraining only; no task file and no writer reads this).

right: addresses the failure kind and says what to do. generic: names the topic, not the remedy. wrong: recommends the habit.
held_out: never in pretraining, kept to measure whether new wordings work. [a|b] is a choice; {markers} are facts of the situation.
"""
import re

VAGUE = ["[Be careful|Take care] [here|with this step|now].", "[Double-check|Check] everything [first|before you answer].", "Think [step by step|about it|twice].", "Read the [request|policy|record] [again|carefully].",
         "[Do your best|Be precise|Be helpful].", "This [step|case] is [tricky|easy to get wrong].", "Follow the [policy|rules]."]
SMALL = "the a an now here is it be must should to of with this that are was has for in on at by and so then as only just your you what which".split()  # may be lost or exchanged
LEADS = ["", "", "Hint: ", "Note: ", "Guidance: ", "Reminder: ", "Tip: ", "HINT: "]
TAILS = ["", "", "", " Then go on.", " This matters.", " Nothing else changes.", " Keep the rest as it is."]

GUIDANCE = {
    "wrong_tool": dict(
        right=["[Use|Call|Choose|Pick] {tool} [here|now|for this|for this request].", "The [right|correct|proper] tool [here|now] is {tool}[|, not {other}].", "This is a [case|job|matter] for {tool}.", "[Do not call|Skip|Avoid] {other}; [call|use|take] {tool} [instead|].",
               "What the user [wants|needs|asks for] is [done|handled|made] by {tool}.", "{tool} is the tool [to use|to call|you need].", "The user [wants|needs|means] the {op}: [call|use] {tool}.", "Only {tool} [does|gives|brings] what the user [wants|asked for].", "[Solve|Handle|Settle] this with {tool}.",
               "[Make|Place|Issue] the call {tool}[| for this user].", "The [request|user] [points to|is about] the {op}, [so|hence] {tool}.", "{other} [is wrong|does not help|is another matter]; {tool} [is right|helps|fits].", "[Settle for|Stay with|Turn to] {tool}.", "[Since|As] the user is after the {op}, {tool} is [meant|needed|called for]."],
        generic=["[Choose|Pick] the tool that [fits|matches] the request.", "[Mind|Check] which tool [fits|does this].", "Another tool [fits|matches] better."],
        wrong=["[Use|Call|Choose] {other} [here|now|].", "The right tool is {other}.", "{other} is the tool to use[|, not {tool}]."],
        held_out=["Go with {tool} for what the user is after.", "Reach for {tool}, since {other} does something else.", "The user is asking for what {tool} does."]),
    "wrong_id": dict(
        right=["[Take|Use|Pass|Send] the {arg} of the {child}[|, not the first one].", "The user [means|wants|asks about] the {child}: [its {arg} is|use|pass] {value}.", "{arg} [must be|should be|is] {value}.", "[Match|Find|Look up] the {child} by name [and|, then] [use|take|pass] its {arg}.",
               "Not the first entry: [take|use|pick] the {child}.", "The [right|correct] {arg} is [that of the {child}|{value}].", "[Pick|Choose] the entry [named|called] {child}.", "The {arg} [belongs to|comes from|stands next to] the {child} in the [list|record|response].",
               "[Fill|Put|Set] {arg} [with|to|from] [the entry|what stands beside|the one for] {child}.", "[Among|Of|Out of] the [listed|shown] [entries|names] [only|] {child} [is meant|counts|was asked for].", "[Copy|Read off] the {arg} [next to|beside|listed with|of] {child}.", "The list has [several|more] [names|entries]; [the user|it] is about {child}.", "[Go|Search] through the list [until|for] {child}."],
        generic=["[Mind|Check] which id belongs to which name.", "[Check|Mind] the id.", "There is more than one [entry|thing] in the [list|record]."],
        wrong=["[Take|Use] the first entry [of the list|].", "{arg} [must be|is] {wrong}.", "The first [id|entry] is the [right|correct] one."],
        held_out=["Copy the {arg} that stands beside the {child}.", "Several entries are listed; the one called {child} is meant.", "Set {arg} to {value}, the {child}."]),
    "wrong_variant": dict(
        right=["[Take|Use|Pass|Send] the {arg} of the {variant} [one|option|entry].", "The user [wants|asked for|means] {variant}: [use|pass|its {arg} is] {value}.", "{arg} [must be|should be|is] {value}.", "[Match|Find|Look up] {variant} in the list [and|, then] [use|take|pass] its {arg}.",
               "Not the first option: [take|use|pick] {variant}.", "The [right|correct] {arg} is [the {variant} one|{value}].", "[Pick|Choose] the option [marked|called] {variant}.", "The {arg} [belongs to|comes from|stands next to] {variant} in the [list|record|response].",
               "[Fill|Put|Set] {arg} [with|to|from] [the entry|what stands beside|the one for] {variant}.", "[Among|Of|Out of] the [listed|shown] [options|choices] [only|] {variant} [is meant|counts|was asked for].", "[Copy|Read off] the {arg} [next to|beside|listed with|of] {variant}.", "The list has [several|more] [choices|options]; [the user|it] is about {variant}.", "[Go|Search] through the list [until|for] {variant}."],
        generic=["[Mind|Check] which option was asked for.", "[Check|Mind] the option.", "There is more than one [option|choice] in the [list|record]."],
        wrong=["[Take|Use] the first option [of the list|].", "{arg} [must be|is] {wrong}.", "The first option is the [right|correct] one."],
        held_out=["Copy the {arg} that stands beside {variant}.", "Several options are listed; {variant} is meant.", "Set {arg} to {value}, the {variant} option."]),
    "wrong_enum": dict(
        right=["{arg} [must be|has to be|should be] one of the [listed|allowed|enum] values[|: here {value}].", "[Use|Send|Write|Pass] {value} [as|for] the {arg}.", "[Translate|Turn|Map] the user's word [into|to] the [closest|nearest|matching] [enum|listed|allowed] value.", "The {arg} is {value}[|, not {wrong}].",
               "{wrong} is not a [listed|allowed|valid] {arg}: [use|send|pass] [{value}|the listed one].", "The tool [takes|knows|accepts] only its [enum|listed] values for {arg}.", "What the user calls {wrong} is {value} [here|in the tool].", "[Choose|Pick|Take] the {arg} from the enum [in the schema|of the tool].",
               "[Look|Search] in the [schema|tool] for the {arg} [that means|behind|closest to] {wrong}.", "[Only|Just] [words|values] from the [enum|schema] [may|can] [stand|be sent] [in|as] {arg}.", "[Replace|Swap] {wrong} [by|with|for] [{value}|the enum value].", "[Fill|Put|Set] {arg} [with|to] {value}.", "By {wrong} the user means {value}."],
        generic=["[Mind|Check] the [value|word] of {arg}.", "[Check|Mind] the {arg}.", "The {arg} needs [care|a second look]."],
        wrong=["[Use|Write|Send] the user's own word [as|for] {arg}.", "The {arg} is {wrong}.", "[Copy|Keep] {wrong} as it was said."],
        held_out=["Pick from the enum of {arg} the value that means {wrong}.", "For {arg} the schema lists the values you may send.", "Write {value} where the user says {wrong}."]),
    "wrong_value": dict(
        right=["[Use|Take|Send|Pass] the {right_field} amount[|, not the {wrong_field}].", "The amount [is|must be|should be] {value}.", "{arg} [equals|is|must be] the {right_field} [amount|field|value] of the [record|response].", "[Ignore|Skip|Leave] the {wrong_field}[;| and] [take|use|copy] the {right_field}.",
               "[Copy|Read] the amount from {right_field}.", "The {wrong_field} is not what [counts|matters]; the {right_field} [is|does].", "What [counts|matters] is {right_field}, [that is|namely|so] {value}.", "By [policy|the rules] the amount [equals|is] the {right_field}.",
               "[Fill|Put|Set] {arg} [with|from|to] [the {right_field}|{value}].", "[Among|Of|Out of] the two [amounts|figures] [choose|pick|send] {right_field}.", "[Go|Work] [with|from] the {right_field} [figure|number|amount][|, leave {wrong_field} alone].", "The [figure|number] [named|under|beside] {right_field} is [the one|what is needed|meant].", "{wrong_field} [misleads|is a trap|does not belong here]."],
        generic=["[Mind|Check] the amount.", "[Check|Mind] where the amount comes from.", "There is more than one amount."],
        wrong=["[Use|Take|Send] the {wrong_field} amount.", "The amount is {wrong}.", "What counts is the {wrong_field}."],
        held_out=["Fill in {arg} from the {right_field} field of the record.", "Two amounts are shown; the {right_field} one is the one to send.", "Go by {right_field} and not by {wrong_field}."]),
    "wrong_unit": dict(
        right=["[Send|Give|Write|Pass] the amount in cents[|, not in dollars].", "[Multiply|Times] the dollars by 100[| to get cents].", "{arg} [is|must be|should be] in cents[|: {value}].", "[Convert|Turn|Change] [dollars|the amount] [into|to] cents.",
               "The tool [counts|wants|takes|expects] cents.", "The amount [is|must be] {value}.", "[Add|Append] two zeros[|, since the tool wants cents].", "One dollar is 100 cents, so [multiply|send {value}|convert].",
               "[Express|State|Count] [it|the amount|the sum] in cents.", "[Scale|Bring] [it|the amount|dollars] [up|] [to cents|by 100].", "The [field|argument] {arg} [holds|means|is for] cents.", "[Before|When] you [send|fill in] the amount, make it cents.", "The record [shows|has] dollars, the tool [needs|reads] cents."],
        generic=["[Mind|Check] the unit.", "[Check|Mind] the unit of the amount.", "Units [matter|differ] here."],
        wrong=["[Send|Give|Write] the amount in dollars.", "The amount is {wrong}.", "[Do not convert|No conversion]: [send|keep] dollars."],
        held_out=["The field {arg} holds cents: dollars times 100.", "Express the amount as cents before you send it.", "Scale the amount to cents, that makes {value}."]),
    "wrong_format": dict(
        right=["[Write|Send|Give|Pass] the date as YYYY-MM-DD[|: {value}].", "{arg} [must be|should be|has to be] [YYYY-MM-DD|an ISO date|in ISO format].", "The date [is|must be|should be] {value}.", "[Convert|Turn|Change] the date [into|to] [YYYY-MM-DD|ISO format|digits].",
               "[Use|Take] [ISO|numeric|YYYY-MM-DD] dates[|, no month names].", "[Do not|Never] [write|send|use] the month as a word; [use|send] [digits|YYYY-MM-DD|numbers].", "The tool [wants|takes|expects|reads] YYYY-MM-DD dates.", "Year first, then month and day[| in digits].",
               "[Rewrite|Put|Bring] [it|the date|{arg}] [in|into] [the form|] YYYY-MM-DD.", "[Only|Just] digits in the date[|: year, month, day].", "[Turn|Change] the [name of the month|month name] into [a number|two digits].", "The [form|format] of {arg} is YYYY-MM-DD.", "[Give|Make] it an ISO date."],
        generic=["[Mind|Check] the format.", "[Check|Mind] the date.", "Formats [matter|differ] here."],
        wrong=["[Write|Send] the date as the user [said|wrote] it.", "The date is {wrong}.", "[Keep|Write] the month as a word."],
        held_out=["Put {arg} in the form YYYY-MM-DD.", "Rewrite the date with digits only, year first.", "An ISO date such as {value} is what the tool reads."]),
    "missing_argument": dict(
        right=["[Set|Include|Add|Pass|Send] [notify|the notify argument][| as well| too].", "notify [must|has to|should] be [set|given|included|sent].", "[Do not|Never] [leave out|forget|omit|skip] notify.", "[Set|Add] notify [to|with] the contact of the record.",
               "notify is [{value}|the contact].", "[Add|Include] {arg} [with the value|:] {value}.", "The policy [wants|asks for|requires] notify [in|on] [every|each] [call|write].", "[Copy|Take] the contact [into|as|for] notify.",
               "[Fill|Put] [the contact|{value}] [in|into] notify.", "[Without|Lacking] notify the call is [incomplete|not complete|wrong].", "[Complete|Finish] the call with notify.", "[Tell|Say] how to notify[|: {value}].", "notify [belongs|goes] [in|into] the call[| too]."],
        generic=["[Mind|Check] that [nothing is missing|the call is complete].", "[Check|Mind] the [optional|missing] argument.", "Something is [missing|left out]."],
        wrong=["[Leave out|Omit|Skip] notify.", "notify is not needed.", "[Send|Give] only the required arguments."],
        held_out=["Put the record's contact in notify.", "The call is complete only with notify in it.", "Fill notify too, with {value}."]),
    "extra_argument": dict(
        right=["[Send|Pass|Give|Use] only the arguments [of the tool|in the schema|that the tool lists].", "[Leave out|Drop|Omit|Skip] {extra}.", "[Do not|Never] [add|invent|send|include] [{extra}|new arguments|other arguments].", "{extra} is not an argument [of the tool|of {tool}].",
               "The [tool|schema] has no {extra}.", "[No|Without] [extra|invented|additional] arguments.", "[Stick|Keep] to the [schema|listed arguments].", "What the user says about [urgency|status|the hurry] is not an argument.",
               "[Nothing|No argument] [but|besides|beyond] [what the schema lists|the listed ones].", "The call [must|should] [not hold|go without|be free of] {extra}.", "[Remove|Strip|Keep out] [{extra}|what the schema lacks].", "[Just|Only] the listed arguments.", "{extra} [does not belong|has no place] [here|in the call]."],
        generic=["[Mind|Check] the arguments.", "[Check|Mind] each argument.", "There may be too [much|many arguments]."],
        wrong=["[Add|Include|Send] {extra}.", "{extra} [must be|should be] set.", "[Tell|Let] the tool [about|know] {extra}."],
        held_out=["Nothing beyond the listed arguments goes into the call.", "The call must not carry {extra}.", "Use the schema's arguments and no {extra}."]),
    "missing_prerequisite": dict(
        right=["[Call|Use|Run] {tool} [first|before anything else].", "[First|Before that|To begin], [call|use|run] {tool}.", "{tool} [comes|goes|must come] first[|, then {other}].", "[Do not|Never] [call|use] {other} [before|without] {tool}.",
               "{other} [has to|must] wait [until|for] {tool}.", "[Begin|Start] with {tool}.", "The policy [wants|asks for|requires] {tool} [first|before {other}].", "[Before|Ahead of] {other} [comes|goes|call] {tool}.",
               "[Make|Let] {tool} [be|] [your|the] first [call|step|move].", "{tool} [precedes|opens the way to|must precede] {other}.", "[Only|Just] after {tool} [comes|may come|call] {other}.", "[Hold|Keep] {other} [back|] until {tool} [is done|has run].", "What is [missing|needed] [now|first] is {tool}."],
        generic=["[Mind|Check] what must [come|happen] first.", "A step is [missing|needed] [before this|first].", "[Check|Mind] the [order|preconditions]."],
        wrong=["[Call|Use] {other} [now|at once|directly].", "[Skip|Leave out] {tool}.", "{tool} is not needed[|: call {other}]."],
        held_out=["The step that has to precede {other} is {tool}.", "Make {tool} your first call.", "Only after {tool} may {other} follow."]),
    "wrong_order": dict(
        right=["[Call|Do|Run] {tool} [first|before {other}].", "[First|To begin], [call|do|run] {tool}[|, then {other}].", "{tool} [comes|goes|must come] [first|before {other}].", "[Do not|Never] [start|begin] with {other}[|; start with {tool}].",
               "{other} [has to|must] [wait|come later|come second].", "[Begin|Start] with [{tool}|the {op}].", "The [{op}|policy order] comes first[|: {tool}].", "The {op} [comes|goes] before the other [one|request].",
               "[Put|Place|Make] [{tool}|the {op}] [ahead of|in front of|before] {other}.", "[Leave|Keep|Save] {other} for [later|the end|afterwards].", "[Of|Among] the two [requests|calls] [start with|take first] {tool}.", "[Now|At this point] [make|do] the {op}, [later|afterwards] the rest.", "{tool} [precedes|must precede] {other}."],
        generic=["[Mind|Check] the order.", "[Check|Mind] which [one|request] [comes|goes] first.", "The order [matters|counts]."],
        wrong=["[Call|Do] {other} first.", "{other} comes before {tool}.", "[Begin|Start] with {other}."],
        held_out=["Of the two requests the {op} has to be made first.", "Put {tool} ahead of {other}.", "Leave {other} for later and make the {op} now."]),
    "policy_limit": dict(
        right=["[Send|Use|Take|Give] at most the limit[|, that is {limit}].", "The [limit|maximum|cap] is {limit}[|: send that].", "The amount [is|must be|should be] {value}.", "[Cap|Limit|Hold] the amount [at|to] {limit}.",
               "[Do not|Never] [go|send] [over|above] {limit}.", "The user asks for [more than|too much for] the policy [allows|]: [use|send|give] {limit}.", "[Stay|Keep] [within|at|under] the [limit|maximum] of {limit}.", "[Reduce|Lower|Cut] the amount to [the limit|the maximum|{limit}].",
               "[Bring|Take|Set] the amount [down|] to [the cap|{limit}].", "[No more|Not more] than {limit} [is allowed|may be sent|].", "[Policy|The rule|The cap] [permits|allows|lets you send] {limit}[| and no more].", "[What|The sum] the user [wants|asks] is [over|above] the [cap|limit].", "[Grant|Allow] [only|just] {limit}."],
        generic=["[Mind|Check] the policy on amounts.", "There is a [rule|policy] on amounts.", "The amount may be too [much|high]."],
        wrong=["[Send|Give] the amount the user asked for.", "The amount is {wrong}.", "[Ignore|Forget] the limit."],
        held_out=["What policy permits is {limit} and no more.", "Bring the amount down to the cap in the policy.", "Grant the highest amount that is allowed, {limit}."]),
    "stale_repeat": dict(
        right=["[Use|Take|Pass|Send] the available {arg}[|: {value}].", "[Do not|Never] repeat [the call|{wrong}][|; take {value}].", "{arg} [must be|should be|is] {value}.", "[Change|Replace|Swap] [{arg}|{wrong}] [to|for|with] [{value}|the available one].",
               "{wrong} is [refused|taken|not available]: [use|take|send] {value}.", "[Take|Use] the [alternative|one] [that the error|the response] [names|offers|lists].", "The [error|response] [names|offers|tells you] the {arg} [to use|that is available].", "[Try|Call] [again|once more] with {value}.",
               "[Go|Settle] for [{value}|what is available].", "[Put|Set] {value} in [place|the place] of {wrong}.", "[Retry|Repeat] with [another|the free|the available] {arg}.", "The [refusal|error] [lists|shows|says] what [is free|is available|can be had].", "{wrong} [is gone|cannot be had|does not work]."],
        generic=["[Mind|Check] the [error|refusal].", "[Read|Check] the error.", "The same call [fails|will fail] again."],
        wrong=["[Repeat|Try] the same call [again|].", "{arg} is {wrong}.", "[Keep|Send] {wrong} [again|once more]."],
        held_out=["Go for what the error lists as available.", "Retry with {value} in place of {wrong}.", "The refusal says which {arg} is free; use that."]),
    "premature_end": dict(
        right=["[Call|Use|Run] {tool} [now|next].", "The [{op}|second request] is [still open|not done|missing]: call {tool}.", "[Do not|Never] [stop|end|finish] [yet|before {tool}|before the {op}].", "[Go on|Continue] with {tool}.",
               "The user [also|still] [wants|needs|asked for] the {op}[|: call {tool}].", "[One|Another] [request|call] is [left|open]: {tool}.", "[Finish|Complete] [it|the job|the request] with {tool}.", "Not everything is done: [make|do] the {op}.",
               "[Carry|Move|Keep] on[:| with] {tool}.", "The {op} [remains|is to come|has not been made].", "[Half|A part|One part] of the [work|request] is [left|open|missing].", "[There is|You have] [still|] work [left|to do]: {tool}.", "[Only|Just] one [request|thing] is done; [now|next] {tool}."],
        generic=["[Mind|Check] whether [all|everything] is done.", "[Check|Count] the requests.", "There may be [more|something left] to do."],
        wrong=["Everything is done[|, so stop].", "[Stop|End] here.", "[Tell|Say to] the user that all is done."],
        held_out=["The {op} remains, so make the call {tool}.", "Carry on with the {op} that was asked for too.", "Half of the work is left: {tool} comes next."]),
    "abandon": dict(
        right=["[Call|Use|Run] {tool} [anyway|all the same|now].", "[Do not|Never] [refuse|give up|say no|decline][|: call {tool}].", "This [can be|may be] [done|changed][|: {tool}].", "Archived {noun}s can be changed[|, so call {tool}].",
               "The {op} is [possible|allowed][|: call {tool}].", "[Carry out|Do|Make] the {op}[| with {tool}].", "[There is no|No] reason to [refuse|decline][|: use {tool}].", "[Go ahead|Proceed] with {tool}.",
               "[The status|Being archived] is no [obstacle|problem|reason][| to refuse].", "[Do|Try] what [was asked|the user asks][|: {tool}].", "It is not too late[| for the {op}][|: {tool}].", "[Nothing|Policy] [stands in the way|forbids this][|, make the call {tool}].", "[Make|Place] the call {tool}, [even if|although] it looks [late|impossible]."],
        generic=["[Mind|Check] whether it [can be done|is possible].", "[Check|Mind] what is [possible|allowed].", "[Check|Mind] the status."],
        wrong=["[Refuse|Decline] [politely|].", "This cannot be done.", "[Say|Tell the user] that you cannot do [it|that]."],
        held_out=["The status is no obstacle, so make the call {tool}.", "Do what was asked even if it looks too late: {tool}.", "Being archived does not stop {tool}."]),
    "substitute": dict(
        right=["[Call|Use|Run] {tool} [yourself|on your own|now].", "[Do not|Never] [hand over|transfer|pass it on][|: call {tool}].", "You can [do|handle|solve] this [yourself|][|: {tool}].", "[No|There is no need for a] [transfer|hand over|human][|: call {tool}].",
               "{tool} [is enough|does it|solves this].", "[Carry out|Do|Make] the {op} [yourself|].", "[Skip|Avoid] transfer_to_human[; call|and use] {tool}.", "An unhappy user still [wants|needs] the {op}[|: {tool}].",
               "[Stay on|Keep] [it|the case] [yourself|][| and call {tool}].", "[No|A] colleague [is needed|need not step in|is not needed].", "[Rather than|Instead of] [handing over|passing on|a transfer], [call|use|make] {tool}.", "The [tool|call] {tool} [settles|ends|answers] [this|the case].", "[Keep|Hold on to] the case[|: {tool}]."],
        generic=["[Mind|Check] who can do this.", "[Check|Mind] the mood of the user.", "The user is [angry|upset]."],
        wrong=["[Hand over|Transfer] to a human.", "[Call|Use] transfer_to_human.", "A human [must|should] do this."],
        held_out=["No colleague is needed, the tool {tool} settles it.", "Stay on the case and make the {op} with {tool}.", "Rather than passing it on, call {tool}."]),
    "chat_amount": dict(
        right=["[Say|State|Give|Name] the {right_field} amount[|, not the {wrong_field}].", "The answer is {value}.", "[Read|Take|Copy] the amount from {right_field}.", "The user asks for the {right_field}[|, that is {value}].",
               "[Ignore|Skip] the {wrong_field}.", "What [counts|matters] is {right_field}[|, not {wrong_field}].", "[Answer|Reply] with [{value}|the {right_field} amount].", "The {wrong_field} is the wrong [number|amount].",
               "[Quote|Report|Tell] [the {right_field}|{value}].", "[Of|Among] the two [figures|amounts] [choose|give|pick] {right_field}.", "The [figure|number] [beside|under|in] {right_field} [is meant|belongs in the answer|counts].", "{wrong_field} [misleads|is a trap|does not belong here].", "[Tell|Give] the user {value}."],
        generic=["[Mind|Check] the amount.", "[Check|Mind] which number is meant.", "There are two amounts."],
        wrong=["[Say|State] the {wrong_field}.", "The answer is {wrong}.", "[Take|Copy] the amount from {wrong_field}."],
        held_out=["Quote the figure in {right_field}.", "Of the two figures the {right_field} one belongs in the answer.", "Tell the user {value}."]),
    "chat_date": dict(
        right=["[Say|State|Give|Name] the date [in|from|of] {right_field}[|, not {wrong_field}].", "The answer is {value}.", "[Read|Take|Copy] the date from {right_field}.", "The user asks for {right_field}[|, that is {value}].",
               "[Ignore|Skip] {wrong_field}.", "What [counts|matters] is {right_field}[|, not {wrong_field}].", "[Answer|Reply] with [{value}|the {right_field} date].", "{wrong_field} is the wrong [date|day].",
               "[Quote|Report|Tell] [the {right_field} date|{value}].", "[Of|Among] the two [days|dates] [choose|give|pick] {right_field}.", "The [day|date] [beside|under|in] {right_field} [is meant|belongs in the answer|counts].", "{wrong_field} [misleads|is a trap|does not belong here].", "[Tell|Give] the user {value}."],
        generic=["[Mind|Check] the date.", "[Check|Mind] which date is meant.", "There are two dates."],
        wrong=["[Say|State] the {wrong_field} date.", "The answer is {wrong}.", "[Take|Copy] the date from {wrong_field}."],
        held_out=["Quote the day in {right_field}.", "Of the two days the {right_field} one belongs in the answer.", "Tell the user {value}."]),
    "chat_unit": dict(
        right=["[Say|State|Give|Name] the amount in dollars[|, not cents].", "[Divide|Split] the cents by 100.", "The answer is {value}.", "The record [counts|is] in cents[|: divide by 100].",
               "[Convert|Turn|Change] cents [into|to] dollars.", "[Answer|Reply] [with {value}|in dollars].", "[Drop|Remove|Strip] the last two [zeros|digits].", "100 cents are one dollar.",
               "[Bring|Scale|Take] the [figure|amount|number] [down|] to dollars.", "[Take|Cut] two zeros off.", "The [figure|number] [is|stands|comes] in cents.", "[Tell|Give] the user [dollars|{value}].", "Cents [must|should] become dollars."],
        generic=["[Mind|Check] the unit.", "[Check|Mind] the size of the amount.", "Units [matter|differ] here."],
        wrong=["[Say|State] the number [of the record|as it is].", "The answer is {wrong}.", "[Do not|Never] convert."],
        held_out=["Bring the cents to dollars before you answer.", "The figure is in cents, so take two zeros off.", "Tell the user {value}, in dollars."]),
    "chat_ask": dict(
        right=["[Ask|Ask the user] [for|which] {value}[| first].", "The {value} is [missing|not given|unknown][|: ask for it].", "[Do not|Never] [say done|claim it is done|act] [before|without] [asking|the {value}][|].", "[First|To begin] ask for the {value}.",
               "You [need|lack|miss] the {value}[|: ask].", "[Ask|Put] a question about the {value}.", "Without a {value} nothing can be done[|: ask for it].", "[Find out|Learn] the {value} [from the user|first].",
               "[Request|Inquire about] the {value}.", "The user [has not|did not] [told you|give|say] the {value}.", "[Reply|Answer] with a question[| for the {value}].", "[Get|Obtain] the {value} [first|before you act].", "[Nothing|No step] [is|can be] done [yet|until the {value} is known]."],
        generic=["[Mind|Check] what is known.", "[Check|Mind] the details.", "Something is not clear."],
        wrong=["[Say|Tell the user] that it is done.", "No question is needed.", "[Do not|Never] ask [anything|questions]."],
        held_out=["The user has not told you the {value} yet, so request it.", "Inquire about the {value} before anything else.", "Your reply should be a question for the {value}."]),
    "chat_promise": dict(
        right=["[Do not|Never] [promise|offer|give] {value}.", "[Refuse|Decline] {value}[| politely].", "{value} is [forbidden|not allowed|against the policy].", "[Say|Tell the user] that you cannot offer {value}.",
               "The policy [forbids|rules out] {value}.", "[No|There is no] {value} [here|for anyone].", "The answer [is no|must be no].", "[Say|Answer] no to {value}.",
               "[Turn|Strike] [down|] the wish[| for {value}].", "You are not [permitted|allowed] to [hand out|give|promise] {value}.", "{value} cannot be [had|given|offered].", "[Make clear|Explain] that there is no {value}.", "[Stay|Be] firm: no {value}."],
        generic=["[Mind|Check] the policy on promises.", "[Check|Mind] what you may promise.", "Promises [need care|matter]."],
        wrong=["[Say|Answer] yes.", "[Promise|Offer|Give] {value}.", "{value} is fine."],
        held_out=["Turn the wish for {value} down.", "You are not permitted to hand out {value}.", "Make clear that {value} cannot be had."]),
    "chat_length": dict(
        right=["[Be|Keep it] [short|brief].", "[Answer|Reply] in [one short sentence|at most {limit} words|few words].", "At most {limit} words.", "[No|Leave out the|Drop the] [introduction|preamble|small talk].",
               "[Only|Just] [say|state|give] the amount.", "[Do not|Never] [ramble|add small talk|start with talk].", "The [limit|maximum] is {limit} words.", "[Cut|Shorten] the answer.",
               "[Get|Come] to the point[| at once].", "[One|A] [brief|short] sentence [will do|is enough].", "[Use|Write] [few|fewer] words[|, at most {limit}].", "[Fewer|Less] talk[|, just the amount].", "[Skip|Omit] [the opening|everything but the amount]."],
        generic=["[Mind|Check] the style.", "[Check|Mind] how you answer.", "Style [matters|counts]."],
        wrong=["[Be|Write] long.", "[Add|Begin with] [an introduction|small talk].", "[Take|Use] many words."],
        held_out=["One brief sentence with the amount will do.", "Get to the point at once.", "Use no more words than policy lets you, {limit}."]),
}


def expand(rng, template, facts):
    """[a|b] -> one of them, then the markers. Facts hold no brackets."""
    text = re.sub(r"\[([^\[\]]*)\]", lambda m: rng.choice(m[1].split("|")), template)
    for key, value in facts.items():
        text = text.replace("{" + key + "}", str(value))
    return re.sub(r" +", " ", text).replace(" .", ".")

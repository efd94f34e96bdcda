/* One response, its coordinator and two agents: acknowledgement, epoch, assignment and lease.

   What runs is coordinator/driver/ingest.py, coordinator/storage/token_store.py, core/instance_controller.py,
   agent/outbox.py and protocol/session.py. Here are their rules alone, so that every order of every fault
   within the limits below is tried (docs/architecture.md, "Journal before acknowledgement", "Epochs and leases"):

   - a frame holds one token of an assignment, with its offset; it stays with the agent until acknowledged
   - the coordinator accepts a token only of the current assignment, and only at the end of what it has
   - it acknowledges frames, and learns that the response is finished, once the journal is synced
   - an agent that comes back under a living epoch keeps its work and sends again what is not acknowledged;
     one whose epoch is over registers anew and forgets its work
   - a process that is killed keeps what it wrote; a power cut takes the unsynced end of journal and event log,
     and after it no epoch and no assignment number is given a second time

   A token is named by the assignment that made it. `text` is the tokens so far, one octal digit each, behind a
   leading 1: two texts are equal only if all their tokens are. Each BUG_ takes one rule away; a test demands
   that the checker notices.
*/

#ifndef TOKENS
#define TOKENS 2                /* of the whole response */
#endif
#ifndef FAULTS
#define FAULTS 2                /* in one life, of any kind */
#endif
#define AGENTS 2
#define NUMBERS 8               /* assignment numbers are octal digits */
#define WAITING 6               /* frames that an agent keeps */
#define FULL 2                  /* of these before its engine is held: endings always have room */

#define NONE 0
#define EMPTY_TEXT 1

#define TOKEN 0                 /* kinds of frames */
#define FINISHED 1
#define RELEASED 2

mtype = { ASSIGN, ABORT, ACK };

typedef Frame { byte kind; byte assignment; byte offset; short text; bool is_sent }
/* `text`: what the agent had before this token. No real frame carries it: the assertion needs it. */

typedef Agent {
  byte epoch;                   /* that it believes to have */
  byte assignment;
  byte offset;
  short text;
  Frame frame[WAITING];         /* not acknowledged, oldest first */
  byte waiting;
  bool is_connected
}

typedef Known {                 /* what the event log holds: the core is made again from it */
  byte current;
  byte holder;
  byte last_number;
  byte last_epoch;
  byte epoch[AGENTS];           /* NONE: lost */
  bool is_finished
}

Agent agent[AGENTS];
#define ON_THE_WAY 2            /* messages of a connection */
chan down[AGENTS] = [ON_THE_WAY] of { mtype, byte, byte, short };
chan up[AGENTS] = [ON_THE_WAY] of { byte, byte, byte, short };

Known core;                     /* in memory; each change is in the event log before it takes effect */
byte length;                    /* accepted */
short text = EMPTY_TEXT;
byte journal_length;            /* on stable storage */
short journal_text = EMPTY_TEXT;
byte owed[AGENTS];              /* frames accepted since the last sync: acknowledged after the next */
bool is_aborting;

byte faults;
byte promised;                  /* tokens whose acknowledgement was sent */

inline disconnect(i) {
  agent[i].is_connected = false;
  empty_channels(i);
  owed[i] = 0
}

inline empty_channels(i) {
  do :: nempty(up[i]) -> up[i] ? _, _, _, _ :: empty(up[i]) -> break od;
  do :: nempty(down[i]) -> down[i] ? _, _, _, _ :: empty(down[i]) -> break od
}

inline take_back(i) {
  if :: core.current != NONE && core.holder == i -> core.current = NONE; is_aborting = false :: else fi
}

inline forget_work(i) {
  agent[i].assignment = NONE; agent[i].offset = 0; agent[i].text = 0;
  j = 0;
  do :: j < WAITING -> clear(i, j); j++ :: else -> break od;
  agent[i].waiting = 0
}

inline clear(i, k) {
  agent[i].frame[k].kind = 0; agent[i].frame[k].assignment = 0; agent[i].frame[k].offset = 0;
  agent[i].frame[k].text = 0; agent[i].frame[k].is_sent = false
}

inline keep(i, a_kind) {
  assert(agent[i].waiting < WAITING);
  agent[i].frame[agent[i].waiting].kind = a_kind;
  agent[i].frame[agent[i].waiting].assignment = agent[i].assignment;
  agent[i].frame[agent[i].waiting].offset = agent[i].offset;
  agent[i].frame[agent[i].waiting].text = agent[i].text;
  agent[i].waiting++
}

inline deliver() {              /* the core learns that the response is finished, and gives it to the trainer */
  assert(journal_text == text && length == TOKENS);
  core.is_finished = true; core.current = NONE; is_aborting = false
}

active [AGENTS] proctype agent_process() {
  byte i = _pid; byte j; byte a_number; byte a_offset; short a_text; byte count;

  do
  :: atomic { core.is_finished -> break }

  :: atomic { !core.is_finished && !agent[i].is_connected ->             /* hello and welcome */
       agent[i].is_connected = true;
       if
       :: core.epoch[i] != NONE && agent[i].epoch == core.epoch[i] ->
            j = 0;
            do :: j < agent[i].waiting -> agent[i].frame[j].is_sent = false; j++ :: else -> break od;
            if
            :: core.current != NONE && core.holder == i && core.current != agent[i].assignment ->
                 count = 0; j = 0;          /* held as well: an ending that is not acknowledged */
                 do
                 :: j < agent[i].waiting ->
                      if :: agent[i].frame[j].assignment == core.current && agent[i].frame[j].kind != TOKEN ->
                              count++
                         :: else fi;
                      j++
                 :: else -> break
                 od;
                 if :: count == 0 -> take_back(i) :: else fi
            :: else
            fi;
            if
            :: agent[i].assignment != NONE && (agent[i].assignment != core.current || core.holder != i) ->
                 down[i] ! ABORT, agent[i].assignment, 0, 0
            :: agent[i].assignment != NONE && agent[i].assignment == core.current && is_aborting ->
                 down[i] ! ABORT, agent[i].assignment, 0, 0
            :: else
            fi
       :: else ->
            take_back(i);
            core.last_epoch++;
            core.epoch[i] = core.last_epoch; agent[i].epoch = core.last_epoch;
            forget_work(i)
       fi; a_number = 0; j = 0; count = 0 }

  :: atomic { agent[i].is_connected && nempty(down[i]) ->
       if
       :: down[i] ? ASSIGN, a_number, a_offset, a_text ->
            agent[i].assignment = a_number; agent[i].offset = a_offset; agent[i].text = a_text
       :: down[i] ? ABORT, a_number, _, _ ->
            if :: agent[i].assignment == a_number ->
                    keep(i, RELEASED); agent[i].assignment = NONE; agent[i].offset = 0; agent[i].text = 0
               :: else fi
       :: down[i] ? ACK, count, _, _ ->
            do
            :: count > 0 ->
                 j = 0;
                 do
                 :: j + 1 < WAITING ->
                      agent[i].frame[j].kind = agent[i].frame[j+1].kind;
                      agent[i].frame[j].assignment = agent[i].frame[j+1].assignment;
                      agent[i].frame[j].offset = agent[i].frame[j+1].offset;
                      agent[i].frame[j].text = agent[i].frame[j+1].text;
                      agent[i].frame[j].is_sent = agent[i].frame[j+1].is_sent; j++
                 :: else -> break
                 od;
                 clear(i, WAITING - 1);
                 agent[i].waiting--; count--
            :: else -> break
            od
       fi; a_number = 0; a_offset = 0; a_text = 0; j = 0; count = 0 }

  :: atomic { agent[i].assignment != NONE && agent[i].offset < TOKENS && agent[i].waiting < FULL ->
       keep(i, TOKEN);                                                   /* the engine makes a token */
       agent[i].text = agent[i].text * 8 + agent[i].assignment;
       agent[i].offset++ }

  :: atomic { agent[i].assignment != NONE && agent[i].offset == TOKENS ->
       keep(i, FINISHED);
       agent[i].assignment = NONE; agent[i].offset = 0; agent[i].text = 0 }

  :: atomic { agent[i].is_connected && agent[i].waiting > 0 && len(up[i]) < ON_THE_WAY &&
              !agent[i].frame[agent[i].waiting - 1].is_sent ->
       j = 0;
       do :: agent[i].frame[j].is_sent -> j++ :: else -> break od;
       agent[i].frame[j].is_sent = true;
       up[i] ! agent[i].frame[j].kind, agent[i].frame[j].assignment, agent[i].frame[j].offset,
               agent[i].frame[j].text;
       j = 0 }

  :: atomic { faults < FAULTS && !core.is_finished && agent[i].epoch != NONE ->       /* the agent is killed */
       faults++;
       disconnect(i); agent[i].epoch = NONE; forget_work(i) }
  od
}

active proctype coordinator() {
  byte i; byte j; byte kind; byte a_number; byte a_offset; short a_text;

  do
  :: atomic { core.is_finished -> break }

  :: atomic { !core.is_finished && core.current == NONE && journal_length == TOKENS ->
       deliver() }                                                       /* it was complete before a restart */

  :: atomic { !core.is_finished && core.current == NONE && length < TOKENS &&                       /* assign */
              ((agent[0].is_connected && core.epoch[0] != NONE && len(down[0]) < ON_THE_WAY) ||
               (agent[1].is_connected && core.epoch[1] != NONE && len(down[1]) < ON_THE_WAY)) ->
       if
       :: agent[0].is_connected && core.epoch[0] != NONE && len(down[0]) < ON_THE_WAY -> i = 0
       :: agent[1].is_connected && core.epoch[1] != NONE && len(down[1]) < ON_THE_WAY -> i = 1
       fi;
       core.last_number++;
       assert(core.last_number < NUMBERS);
       core.current = core.last_number; core.holder = i;
       down[i] ! ASSIGN, core.current, length, text;
       i = 0 }

  :: atomic { nempty(up[0]) || nempty(up[1]) ->                                              /* take a frame */
       if :: nempty(up[0]) -> i = 0 :: nempty(up[1]) -> i = 1 fi;
       up[i] ? kind, a_number, a_offset, a_text;
       owed[i]++;
       if
#ifdef BUG_LATE_FRAMES_ARE_ACCEPTED
       :: core.current == NONE -> skip
#else
       :: core.current == NONE || a_number != core.current || core.holder != i -> skip    /* late: dropped */
#endif
       :: else ->
            if
            :: kind == TOKEN && a_offset == length ->
                 assert(a_text == text);             /* it follows from exactly the tokens before it */
                 text = text * 8 + a_number; length++
            :: kind == TOKEN && a_offset != length -> skip            /* a duplicate, or behind a gap: dropped */
            :: kind == FINISHED && length < TOKENS ->
                 core.current = NONE; is_aborting = false                    /* tokens are missing: once more */
            :: kind == FINISHED && length == TOKENS -> skip
            :: kind == RELEASED -> core.current = NONE; is_aborting = false
            fi
       fi;
#ifdef BUG_ACKNOWLEDGES_BEFORE_THE_SYNC
       if :: len(down[i]) < ON_THE_WAY -> down[i] ! ACK, owed[i], 0, 0; owed[i] = 0; promised = length :: else fi;
#endif
#ifdef BUG_FINISHES_BEFORE_THE_SYNC
       if :: length == TOKENS && !core.is_finished -> deliver() :: else fi;
#endif
       i = 0; kind = 0; a_number = 0; a_offset = 0; a_text = 0 }

  :: atomic { length != journal_length || owed[0] > 0 || owed[1] > 0 ->         /* the journal is synced */
       journal_length = length; journal_text = text;
       promised = length;
       if :: length == TOKENS && !core.is_finished -> deliver() :: else fi;
       if :: owed[0] > 0 && len(down[0]) < ON_THE_WAY -> down[0] ! ACK, owed[0], 0, 0; owed[0] = 0 :: else fi;
       if :: owed[1] > 0 && len(down[1]) < ON_THE_WAY -> down[1] ! ACK, owed[1], 0, 0; owed[1] = 0 :: else fi }

  :: atomic { faults < FAULTS && !core.is_finished && core.current != NONE && !is_aborting &&
              agent[core.holder].is_connected && len(down[core.holder]) < ON_THE_WAY ->  /* the response is moved: abort it */
       faults++; is_aborting = true;
       down[core.holder] ! ABORT, core.current, 0, 0 }
  od
}

active proctype fault() {
  byte i; byte j;

  do
  :: atomic { core.is_finished || faults == FAULTS -> break }

  :: atomic { faults < FAULTS && !core.is_finished &&                            /* a connection breaks */
              (agent[0].is_connected || agent[1].is_connected) ->
       if :: agent[0].is_connected -> i = 0 :: agent[1].is_connected -> i = 1 fi;
       faults++; disconnect(i); i = 0 }

  :: atomic { faults < FAULTS && !core.is_finished &&         /* a lease runs out; its agent may well be alive */
              (core.epoch[0] != NONE || core.epoch[1] != NONE) ->
       if :: core.epoch[0] != NONE -> i = 0 :: core.epoch[1] != NONE -> i = 1 fi;
       faults++; take_back(i); core.epoch[i] = NONE; disconnect(i); i = 0 }

  :: atomic { faults < FAULTS && !core.is_finished ->                      /* the coordinator is killed */
       faults++;
       disconnect(0); disconnect(1);
       length = journal_length; text = journal_text; is_aborting = false;
       assert(length >= promised) }

  :: atomic { faults < FAULTS && !core.is_finished ->                                   /* a power cut */
       faults++;
       disconnect(0); disconnect(1);
       length = journal_length; text = journal_text; is_aborting = false;
       /* the event log lost its end: all register again, and numbers go on behind all that were given */
       core.epoch[0] = NONE; core.epoch[1] = NONE; core.current = NONE;
       assert(length >= promised) }

  od
}

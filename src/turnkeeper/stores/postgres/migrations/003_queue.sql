-- Queues (turnkeeper.transport): one table, and one function for each step, so that a step is one statement.
--
-- `place` is the order in which entries are handed out. It is taken from one sequence when an entry becomes ready, so it follows the
-- order of publication, and what was delayed or retried stands behind what was ready before. `due` is when a delayed entry becomes
-- ready, when a held one's lease ends, or since when a dead one is dead: milliseconds of the store's clock. `reason` is why an entry
-- is dead, or not empty where a ready one was left by its consumer.

CREATE TABLE :schema.queue_entry (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue text COLLATE "C" NOT NULL,
    key text NOT NULL,
    body bytea NOT NULL,
    state text COLLATE "C" NOT NULL,
    place bigint NOT NULL,
    due bigint NOT NULL,
    attempt integer NOT NULL DEFAULT 0,
    fence integer NOT NULL DEFAULT 0,
    consumer text NOT NULL DEFAULT '',
    published bigint NOT NULL,
    reason text NOT NULL DEFAULT '',
    history jsonb NOT NULL DEFAULT '[]'
);
CREATE SEQUENCE :schema.queue_place OWNED BY :schema.queue_entry.place;
CREATE INDEX queue_entry_ready ON :schema.queue_entry (queue, place) WHERE state = 'ready';
CREATE INDEX queue_entry_due ON :schema.queue_entry (queue, state, due) WHERE state <> 'ready';

CREATE FUNCTION :schema.queue_now_v1() RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT floor(date_part('epoch', clock_timestamp()) * 1000)::bigint + value FROM :schema.meta WHERE name = 'clock_offset_ms'
$$;

-- Whoever waits for the queue is told of its change, as 002 tells who waits for a log; nobody is notified where nobody waits.
CREATE FUNCTION :schema.queue_notify_v1(p_queue text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_lock bigint := :schema.waiters_lock_v1('queue:' || p_queue);
BEGIN
    IF NOT pg_try_advisory_xact_lock(v_lock) THEN
        PERFORM pg_notify(:schema.channel_v1(), v_lock::text);
    END IF;
END $$;

-- The last p_remembered failures, with one more.
CREATE FUNCTION :schema.queue_failed_v1(
    p_history jsonb, p_now bigint, p_attempt integer, p_consumer text, p_reason text, p_remembered integer
)
RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN jsonb_array_length(p_history) >= p_remembered THEN p_history - 0 ELSE p_history END
        || jsonb_build_object('at', p_now, 'attempt', p_attempt, 'consumer', p_consumer, 'reason', p_reason)
$$;

CREATE FUNCTION :schema.queue_publish_v1(p_queue text, p_key text, p_body bytea, p_delay bigint, p_patience_ms integer)
RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    v_now bigint := :schema.queue_now_v1();
    v_id bigint;
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    INSERT INTO :schema.queue_entry (queue, key, body, state, place, due, published)
        VALUES (
            p_queue, p_key, p_body, CASE WHEN p_delay > 0 THEN 'delayed' ELSE 'ready' END,
            nextval(':schema.queue_place'), v_now + p_delay, v_now
        ) RETURNING id INTO v_id;
    PERFORM :schema.queue_notify_v1(p_queue);
    RETURN v_id;
END $$;

-- When the next delay or lease ends; null where there is none.
CREATE FUNCTION :schema.queue_due_v1(p_queue text) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT least(
        (SELECT min(due) FROM :schema.queue_entry WHERE queue = p_queue AND state = 'delayed' AND state <> 'ready'),
        (SELECT min(due) FROM :schema.queue_entry WHERE queue = p_queue AND state = 'held' AND state <> 'ready')
    )
$$;

-- Whether there is something to take, and milliseconds until there is.
CREATE FUNCTION :schema.queue_look_v1(p_queue text) RETURNS TABLE (ready boolean, due_in bigint)
LANGUAGE sql VOLATILE AS $$
    SELECT d.due <= :schema.queue_now_v1()
            OR EXISTS (SELECT FROM :schema.queue_entry WHERE queue = p_queue AND state = 'ready'),
        greatest(0, d.due - :schema.queue_now_v1())
    FROM (SELECT coalesce(:schema.queue_due_v1(p_queue), 9223372036854775807) AS due) d
$$;

-- Hand out entries: one row for each; or one row without an id, with the milliseconds until the next entry is due.
-- Nobody waits for rows that another consumer is just taking.
CREATE FUNCTION :schema.queue_take_v1(
    p_queue text, p_consumer text, p_count integer, p_lease bigint, p_limit integer, p_remembered integer,
    p_lease_ended text, p_limit_reached text, p_patience_ms integer
)
RETURNS TABLE (id bigint, key text, body bytea, attempt integer, fence integer, published bigint, due_in bigint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    v_now bigint := :schema.queue_now_v1();
    v_found :schema.queue_entry;
    v_handed integer := 0;
    v_left :schema.queue_entry;
    v_ids bigint[];
    v_dead boolean;
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    FOR v_found IN SELECT * FROM :schema.queue_entry e
        WHERE e.queue = p_queue AND e.state = 'delayed' AND e.state <> 'ready' AND e.due <= v_now
        ORDER BY e.due, e.id LIMIT 500 FOR UPDATE SKIP LOCKED
    LOOP
        UPDATE :schema.queue_entry e SET state = 'ready', place = nextval(':schema.queue_place') WHERE e.id = v_found.id;
    END LOOP;

    FOR v_found IN SELECT * FROM :schema.queue_entry e
        WHERE e.queue = p_queue AND e.state = 'held' AND e.state <> 'ready' AND e.due <= v_now
        ORDER BY e.due, e.id LIMIT 500 FOR UPDATE SKIP LOCKED
    LOOP
        v_dead := v_found.attempt >= p_limit;
        UPDATE :schema.queue_entry e SET
            state = CASE WHEN v_dead THEN 'dead' ELSE 'ready' END, place = nextval(':schema.queue_place'),
            due = v_now, reason = CASE WHEN v_dead THEN p_limit_reached ELSE p_lease_ended END,
            history = :schema.queue_failed_v1(
                e.history, v_now, e.attempt, e.consumer, p_lease_ended, p_remembered
            )
            WHERE e.id = v_found.id;
    END LOOP;

    -- What was left by its consumer may kill this one too: one of those is enough for a call, at its place.
    SELECT * INTO v_left FROM :schema.queue_entry e WHERE e.queue = p_queue AND e.state = 'ready' AND e.reason <> ''
        ORDER BY e.place LIMIT 1 FOR UPDATE SKIP LOCKED;
    SELECT array_agg(r.id ORDER BY r.place) INTO v_ids FROM (
        SELECT e.id, e.place FROM :schema.queue_entry e WHERE e.queue = p_queue AND e.state = 'ready' AND e.reason = ''
            ORDER BY e.place LIMIT p_count FOR UPDATE SKIP LOCKED
    ) r;
    FOR v_found IN SELECT * FROM :schema.queue_entry e WHERE e.id = ANY (v_ids) OR e.id = v_left.id
        ORDER BY e.place LIMIT p_count
    LOOP
        IF v_found.attempt >= p_limit THEN
            UPDATE :schema.queue_entry e SET state = 'dead', due = v_now, reason = p_limit_reached WHERE e.id = v_found.id;
        ELSE
            RETURN QUERY UPDATE :schema.queue_entry e SET
                    state = 'held', due = v_now + p_lease, attempt = e.attempt + 1, fence = e.fence + 1,
                    consumer = p_consumer, reason = ''
                WHERE e.id = v_found.id RETURNING e.id, e.key, e.body, e.attempt, e.fence, e.published, 0::bigint;
            v_handed := v_handed + 1;
        END IF;
    END LOOP;

    IF v_handed = 0 THEN
        due_in := greatest(0, :schema.queue_due_v1(p_queue) - v_now);
        RETURN NEXT;
    END IF;
END $$;

-- Settle a delivery: 1 done; 0 it is not held any more; -1 there is no such entry.
CREATE FUNCTION :schema.queue_settle_v1(
    p_queue text, p_id bigint, p_fence integer, p_what text, p_length bigint, p_reason text, p_limit integer,
    p_remembered integer, p_patience_ms integer
)
RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_found :schema.queue_entry;
    v_now bigint;
    v_dead boolean;
    v_told jsonb;
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    SELECT * INTO v_found FROM :schema.queue_entry e WHERE e.id = p_id AND e.queue = p_queue FOR UPDATE;
    IF NOT FOUND THEN
        RETURN -1;
    END IF;
    v_now := :schema.queue_now_v1(); -- once the row is locked, not before a long wait for it
    IF v_found.state <> 'held' OR v_found.fence <> p_fence OR v_found.due <= v_now THEN
        RETURN 0;
    END IF;
    IF p_what = 'acknowledge' THEN
        DELETE FROM :schema.queue_entry WHERE id = p_id;
        RETURN 1;
    ELSIF p_what = 'extend' THEN
        UPDATE :schema.queue_entry SET due = v_now + p_length WHERE id = p_id;
        RETURN 1;
    ELSIF p_what = 'release' THEN
        UPDATE :schema.queue_entry SET
            state = CASE WHEN p_length > 0 THEN 'delayed' ELSE 'ready' END, due = v_now + p_length, attempt = attempt - 1
            WHERE id = p_id;
    ELSE
        v_dead := p_what = 'kill' OR v_found.attempt >= p_limit;
        v_told := :schema.queue_failed_v1(
            v_found.history, v_now, v_found.attempt, v_found.consumer, p_reason, p_remembered
        );
        UPDATE :schema.queue_entry SET
            state = CASE WHEN v_dead THEN 'dead' WHEN p_length > 0 THEN 'delayed' ELSE 'ready' END,
            place = nextval(':schema.queue_place'), due = CASE WHEN v_dead THEN v_now ELSE v_now + p_length END,
            reason = CASE WHEN v_dead THEN p_reason ELSE '' END, history = v_told
            WHERE id = p_id;
    END IF;
    PERFORM :schema.queue_notify_v1(p_queue);
    RETURN 1;
END $$;

-- Revive a dead letter, or forget it. Whether it was dead.
CREATE FUNCTION :schema.queue_exhume_v1(p_queue text, p_id bigint, p_revive boolean, p_patience_ms integer)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('lock_timeout', p_patience_ms::text, true);
    IF p_revive THEN
        UPDATE :schema.queue_entry SET state = 'ready', place = nextval(':schema.queue_place'), attempt = 0, reason = ''
            WHERE id = p_id AND queue = p_queue AND state = 'dead';
    ELSE
        DELETE FROM :schema.queue_entry WHERE id = p_id AND queue = p_queue AND state = 'dead';
    END IF;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM :schema.queue_notify_v1(p_queue);
    RETURN true;
END $$;

CREATE FUNCTION :schema.queue_letters_v1(p_queue text, p_after bigint, p_limit integer)
RETURNS TABLE (
    id bigint, key text, body bytea, published bigint, attempts integer, reason text, history text, died bigint
)
LANGUAGE sql STABLE AS $$
    SELECT e.id, e.key, e.body, e.published, e.attempt, e.reason, e.history::text, e.due FROM :schema.queue_entry e
        WHERE e.queue = p_queue AND e.state = 'dead' AND e.state <> 'ready' AND e.id > p_after ORDER BY e.id LIMIT p_limit
$$;

CREATE FUNCTION :schema.queue_depth_v1(p_queue text)
RETURNS TABLE (ready bigint, delayed bigint, in_flight bigint, dead bigint) LANGUAGE sql VOLATILE AS $$
    SELECT count(*) FILTER (WHERE e.state = 'ready' OR (e.state IN ('delayed', 'held') AND e.due <= n.now)),
        count(*) FILTER (WHERE e.state = 'delayed' AND e.due > n.now),
        count(*) FILTER (WHERE e.state = 'held' AND e.due > n.now),
        count(*) FILTER (WHERE e.state = 'dead')
    FROM (SELECT :schema.queue_now_v1() AS now) n LEFT JOIN :schema.queue_entry e ON e.queue = p_queue
$$;

-- Transactional tools write to none of our tables: this one is ours too.
CREATE OR REPLACE FUNCTION :schema.writes_v1() RETURNS bigint LANGUAGE sql AS $$
    SELECT sum(
        pg_stat_get_xact_tuples_inserted(t) + pg_stat_get_xact_tuples_updated(t) + pg_stat_get_xact_tuples_deleted(t)
    )::bigint FROM unnest(ARRAY[
        ':schema.meta'::regclass, ':schema.head'::regclass, ':schema.record'::regclass, ':schema.queue_entry'::regclass
    ]) t
$$;

import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.regex.Pattern;
import java.util.stream.IntStream;
import java.util.zip.CRC32;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.ToNumberPolicy;

/** Delays and schedules of bide: what to publish and what to declare. docs/wire-contract.md has the rules. */
final class Wire {
    record Level(String letter, long unit, int highest) {}

    record Digit(Level level, int value) {}

    /** A queue, or an exchange with a routing key. */
    record Target(String queue, boolean isolated, String exchange, String routingKey) {
        boolean isQueue() {
            return queue != null;
        }

        /** The header bide-to. */
        @Override
        public String toString() {
            return isQueue() ? "q:" + queue : "x:" + exchange;
        }

        static Target of(Map<String, ?> fields) {
            boolean isolated = Boolean.TRUE.equals(fields.get("isolated"));
            return new Target(
                (String) fields.get("queue"), isolated, (String) fields.get("exchange"), (String) fields.get("routing_key"));
        }
    }

    record Queue(String name, Map<String, Object> arguments) {}

    record Binding(String source, String destination, boolean toQueue, String routingKey) {}

    record Declarations(List<Queue> queues, List<Binding> bindings) {}

    /** What to publish; priority and expiration are null for none. */
    record Publish(String exchange, String routingKey, Map<String, Object> headers, Integer priority, String expiration) {}

    record Delayed(Publish publish, List<String> waitsIn, Declarations declare) {}

    static final String BASE = "bide.v1";
    private static final List<Level> LEVELS = List.of(
        new Level("e", 8_640_000_000L, 31),
        new Level("d", 86_400_000L, 99),
        new Level("h", 3_600_000L, 23),
        new Level("m", 60_000L, 59),
        new Level("s", 1_000L, 59),
        new Level("c", 10L, 99));
    private static final long RESOLUTION = 10;
    private static final long LONGEST = LEVELS.stream().mapToLong(one -> one.unit * one.highest).sum();
    /** 'bide delay apply' binds the digits for routing keys of up to four words. */
    private static final int WORDS_AT_APPLY = 4;
    private static final int MAX_NAME = 255;
    private static final int PARTITIONS = 8;
    private static final Pattern TRANSPORT_KEY =
        Pattern.compile("(?:~\\.)*~(?:[edhmsc][0-9]{1,2}(?:/[0-9]+)?|[qrxk][:#].*)", Pattern.DOTALL);
    private static final Pattern OF_THE_BROKER = Pattern.compile(
        "CC|BCC|x-death|x-(?:first|last)-death-(?:exchange|queue|reason)|x-delivery-count|x-acquired-count");

    /** Reads whole numbers as Long. */
    static final Gson JSON = new GsonBuilder()
        .setObjectToNumberStrategy(ToNumberPolicy.LONG_OR_DOUBLE).disableHtmlEscaping().create();

    private Wire() {}

    // -- delayed messages

    /**
     * What to publish and to declare for a message.
     *
     * @param delay milliseconds
     * @param now milliseconds since the Unix epoch
     * @param release of the broker, such as 3.10.8
     * @param headers of the message itself
     */
    static Delayed delayed(
        Target target, long delay, long now, String release, Map<String, ?> headers, Integer priority, String expiration) {
        if (delay < 0) throw new IllegalArgumentException("the delay " + delay + " is negative");
        long wait = (delay + RESOLUTION - 1) / RESOLUTION * RESOLUTION;
        if (wait > LONGEST) throw new IllegalArgumentException("the delay " + delay + " is longer than " + LONGEST + " ms");
        check(target);
        String routingKey = target.isQueue() ? target.queue : target.routingKey;
        Map<String, Object> all = new LinkedHashMap<>(headers);
        all.put("bide-sent", now);
        all.put("bide-due", now + delay);
        if (wait == 0) {
            String exchange = target.isQueue() ? "" : target.exchange;
            Publish publish = new Publish(exchange, routingKey, all, priority, expiration);
            return new Delayed(publish, List.of(), new Declarations(List.of(), List.of()));
        }
        int words = target.isQueue() ? 1 : words(routingKey);
        String padding = "~.".repeat(words - 1);
        List<Digit> digits = digits(wait);
        String targetKey = limited(padding + key(target));
        List<String> keys = new ArrayList<>();
        for (Digit one : digits) keys.add(padding + "~" + one.level.letter + one.value);
        keys.add(targetKey);
        all.put(carrier(release), keys);
        all.put("bide-to", target.toString());
        // In a delay queue these two would act on the wait.
        if (priority != null) all.put("bide-priority", priority);
        if (expiration != null) all.put("bide-expiration", expiration);
        Declarations declare = declarations(target, targetKey);
        if (words > WORDS_AT_APPLY) declare.bindings.addAll(digitBindings(digits, keys));
        List<String> waitsIn = digits.stream().filter(one -> one.value > 0).map(Wire::queue).toList();
        String entry = BASE + ".in." + digits.get(0).level.letter;
        return new Delayed(new Publish(entry, routingKey, all, null, null), waitsIn, declare);
    }

    /** From 4.0 on the broker keeps BCC keys, and receivers do not see them. */
    private static String carrier(String release) {
        return Integer.parseInt(release.split("\\.")[0]) >= 4 ? "BCC" : "CC";
    }

    private static void check(Target target) {
        String name = target.isQueue() ? target.queue : target.exchange;
        if (name.isEmpty()) throw new IllegalArgumentException("the target has no name");
        limited(name);
        String key = limited(target.isQueue() ? target.queue : target.routingKey);
        if (TRANSPORT_KEY.matcher(key).matches()) {
            throw new IllegalArgumentException(key + " has the form of a transport key");
        }
    }

    private static String limited(String name) {
        if (utf8(name).length > MAX_NAME) {
            throw new IllegalArgumentException(name + " is longer than " + MAX_NAME + " bytes");
        }
        return name;
    }

    private static int words(String routingKey) {
        return (int) routingKey.chars().filter(one -> one == '.').count() + 1;
    }

    /** The levels from the highest with a digit down to the lowest, each with its digit. */
    private static List<Digit> digits(long wait) {
        List<Digit> digits = new ArrayList<>();
        for (Level level : LEVELS) {
            int value = (int) (wait / level.unit);
            wait %= level.unit;
            if (value > 0 || !digits.isEmpty()) digits.add(new Digit(level, value));
        }
        return digits;
    }

    private static String queue(Digit digit) {
        return BASE + "." + digit.level.letter + digit.value;
    }

    private static String key(Target target) {
        if (target.isQueue()) return (target.isolated ? "~r:" : "~q:") + target.queue;
        return "~x:" + target.exchange.replace("%", "%25").replace(".", "%2E");
    }

    /** The binding of the target, and the release queue of exchanges and isolated queues. */
    private static Declarations declarations(Target target, String targetKey) {
        List<Queue> queues = new ArrayList<>();
        String destination = target.queue;
        if (!target.isQueue() || target.isolated) {
            destination = limited(BASE + ".release." + target);
            Map<String, Object> arguments = new LinkedHashMap<>();
            arguments.put("x-queue-type", "quorum");
            arguments.put("x-message-ttl", 0);
            arguments.put("x-dead-letter-exchange", target.isQueue() ? "" : target.exchange);
            arguments.put("x-dead-letter-strategy", "at-least-once");
            arguments.put("x-overflow", "reject-publish");
            arguments.put("x-queue-leader-locator", "balanced");
            if (target.isQueue()) arguments.put("x-dead-letter-routing-key", target.queue);
            queues.add(new Queue(destination, arguments));
        }
        List<Binding> bindings = new ArrayList<>();
        bindings.add(new Binding(BASE + ".delivery", destination, true, targetKey));
        return new Declarations(queues, bindings);
    }

    private static List<Binding> digitBindings(List<Digit> digits, List<String> keys) {
        return IntStream.range(0, digits.size()).mapToObj(place -> {
            Digit digit = digits.get(place);
            boolean isLast = place + 1 == digits.size();
            String below = BASE + "." + (isLast ? "released" : digits.get(place + 1).level.letter);
            String source = BASE + "." + digit.level.letter;
            return new Binding(source, digit.value > 0 ? queue(digit) : below, digit.value > 0, keys.get(place));
        }).toList();
    }

    // -- received messages

    /** What a message says about its wait: due time in milliseconds, and the key of its schedule; null if it has none. */
    record Received(Long due, String key) {
        static Received of(Map<String, Object> headers) {
            return new Received((Long) headers.get("bide-due"), (String) headers.get("bide-key"));
        }
    }

    /** The headers for a copy of a received message. Its priority and expiration are in bide-priority and bide-expiration. */
    static Map<String, Object> copy(Map<String, Object> headers) {
        Map<String, Object> copy = new LinkedHashMap<>(headers);
        copy.keySet().removeIf(name -> name.startsWith("bide-") || OF_THE_BROKER.matcher(name).matches());
        return copy;
    }

    // -- schedules

    record Message(Map<String, Object> properties, byte[] body) {}

    record Record(String exchange, List<String> routingKeys, byte[] body) {}

    private static final int LARGE = 64_000;
    private static final int SPACES = 4_096;

    static int partition(String key) {
        CRC32 crc = new CRC32();
        crc.update(utf8(key));
        return (int) (crc.getValue() % PARTITIONS);
    }

    /**
     * The record of an operation.
     *
     * @param operation kind, request, key, target, due and so on; absent ones are null or missing
     * @param message for the kind "schedule", otherwise null
     */
    static Record record(Map<String, ?> operation, Message message, long now) {
        String key = (String) operation.get("key");
        Map<String, Object> head = new LinkedHashMap<>();
        head.put("v", 1);
        put(head, operation, "kind", "request", "key");
        byte[] tail = {};
        if (message != null) {
            Target target = Target.of(fields(operation.get("target")));
            head.put("to", target.toString());
            if (!target.isQueue() && !target.routingKey.isEmpty()) head.put("routing_key", target.routingKey);
            head.put("nominal", operation.get("due"));
            put(head, operation, "due");
            if (operation.get("interval") != null) {
                head.put("every", Map.of("interval", operation.get("interval"), "anchor", now, "catch_up", "last"));
            }
            put(head, operation, "if_absent", "if_version");
            byte[] properties = properties(message.properties);
            head.put("message", List.of(properties.length, message.body.length));
            tail = join(properties, message.body);
        } else {
            if (operation.get("filter") != null) head.put("filter", filter(fields(operation.get("filter"))));
            put(head, operation, "due", "at", "if_version");
        }
        byte[] text = utf8(JSON.toJson(head) + "\n");
        if (text.length + tail.length >= LARGE) {
            // Gates add fields of their own to large messages, and the broker must accept the result as well.
            text = utf8(new String(text, StandardCharsets.UTF_8).replaceFirst("^\\{\"v\":", "$0" + " ".repeat(SPACES)));
        }
        IntStream partitions = key == null ? IntStream.range(0, PARTITIONS) : IntStream.of(partition(key));
        return new Record(BASE + ".schedule", partitions.mapToObj(Integer::toString).toList(), join(text, tail));
    }

    private static void put(Map<String, Object> head, Map<String, ?> operation, String... names) {
        for (String name : names) {
            if (operation.get(name) != null) head.put(name, operation.get(name));
        }
    }

    private static Map<String, Object> filter(Map<String, ?> conditions) {
        Map<String, Object> filter = new LinkedHashMap<>();
        put(filter, conditions, "prefix", "due_from", "due_before");
        if (conditions.get("target") != null) filter.put("to", Target.of(fields(conditions.get("target"))).toString());
        return filter;
    }

    /** The answer of a gate: outcome, version and so on. */
    static Map<String, Object> answer(byte[] body) {
        Map<String, Object> answer = fields(JSON.fromJson(new String(body, StandardCharsets.UTF_8), Object.class));
        if (((Number) answer.get("v")).intValue() != 1) {
            throw new IllegalArgumentException("the version " + answer.get("v") + " of an answer is unknown");
        }
        return answer;
    }

    record Question(String exchange, String routingKey, byte[] body) {}

    /** The question for what waits under a key. */
    static Question question(String key) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("v", 1);
        fields.put("ask", "key");
        fields.put("key", key);
        return new Question(BASE + ".schedule", "queries." + partition(key), utf8(JSON.toJson(fields) + "\n"));
    }

    /** What the answer to a question says. The messages behind its first line are left out. */
    static Map<String, Object> state(byte[] body) {
        int end = 0;
        while (body[end] != '\n') end++;
        List<?> entries = (List<?>) answer(Arrays.copyOf(body, end)).get("entries");
        if (entries.isEmpty()) return Map.of("state", "none");
        Map<String, Object> first = fields(entries.get(0)); // what waits comes before what is under way
        if (!first.get("is").equals("waiting")) return Map.of("state", "under-way", "due", first.get("due"));
        String state = Boolean.TRUE.equals(first.get("is_paused")) ? "paused" : "waiting";
        return Map.of("state", state, "due", first.get("due"), "version", first.get("version"));
    }

    @SuppressWarnings("unchecked")
    static Map<String, Object> fields(Object object) {
        return (Map<String, Object>) object;
    }

    /** The properties in the order of an AMQP 0-9-1 content header. Their flags begin with the highest bit. */
    private static final List<String> PROPERTIES = List.of(
        "content_type", "content_encoding", "headers", "delivery_mode", "priority", "correlation_id", "reply_to",
        "expiration", "message_id", "timestamp", "type", "user_id", "app_id");
    private static final Set<String> BYTES = Set.of("delivery_mode", "priority");

    private static byte[] properties(Map<String, Object> properties) {
        for (String name : properties.keySet()) {
            if (!PROPERTIES.contains(name)) throw new IllegalArgumentException(name + " is not a property of a message");
        }
        int flags = 0;
        byte[] all = {};
        for (int place = 0; place < PROPERTIES.size(); place++) {
            String name = PROPERTIES.get(place);
            Object value = properties.get(name);
            if (value == null) continue;
            flags |= 0x8000 >> place;
            byte[] encoded = switch (name) {
                case "headers" -> table(fields(value));
                case "timestamp" -> ByteBuffer.allocate(8).putLong(((Number) value).longValue()).array();
                default -> BYTES.contains(name) ? new byte[] {((Number) value).byteValue()} : shortString((String) value);
            };
            all = join(all, encoded);
        }
        return join(new byte[] {(byte) (flags >> 8), (byte) flags}, all);
    }

    private static byte[] table(Map<String, Object> headers) {
        byte[] all = {};
        for (Map.Entry<String, Object> one : headers.entrySet()) {
            all = join(all, shortString(one.getKey()), value(one.getValue()));
        }
        return longString(all);
    }

    private static byte[] value(Object value) {
        if (value instanceof Number number) {
            long whole = number.longValue();
            return whole == (int) whole
                ? ByteBuffer.allocate(5).put((byte) 'I').putInt((int) whole).array()
                : ByteBuffer.allocate(9).put((byte) 'l').putLong(whole).array();
        }
        return join(new byte[] {'S'}, longString(utf8((String) value)));
    }

    private static byte[] shortString(String text) {
        byte[] bytes = utf8(limited(text));
        return join(new byte[] {(byte) bytes.length}, bytes);
    }

    private static byte[] longString(byte[] bytes) {
        return join(ByteBuffer.allocate(4).putInt(bytes.length).array(), bytes);
    }

    private static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    private static byte[] join(byte[]... parts) {
        ByteArrayOutputStream joined = new ByteArrayOutputStream();
        for (byte[] part : parts) joined.writeBytes(part);
        return joined.toByteArray();
    }
}

import java.nio.charset.StandardCharsets;
import java.security.SecureRandom;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;

import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.Delivery;
import com.rabbitmq.client.LongString;

/** Delays, receives, schedules and cancels messages on the RabbitMQ of BIDE_URL. Without arguments it lists the commands. */
public final class Main {
    private static final Map<String, String> COMMANDS = new LinkedHashMap<>();

    static {
        COMMANDS.put("vectors", "FILE");
        COMMANDS.put("delay", "TARGET MILLISECONDS BODY");
        COMMANDS.put("receive", "QUEUE COUNT");
        COMMANDS.put("retry", "QUEUE MILLISECONDS");
        COMMANDS.put("schedule", "KEY TARGET MILLISECONDS BODY");
        COMMANDS.put("scheduled", "KEY");
        COMMANDS.put("cancel", "KEY");
    }

    private final Connection connection;

    private Main(Connection connection) {
        this.connection = connection;
    }

    public static void main(String[] args) throws Exception {
        String usage = args.length == 0 ? null : COMMANDS.get(args[0]);
        if (usage == null || args.length != usage.split(" ").length + 1) {
            COMMANDS.forEach((name, parameters) -> System.err.println("java Main " + name + " " + parameters));
            System.exit(2);
        }
        if (args[0].equals("vectors")) {
            System.out.println(Vectors.check(args[1]) + " vectors are right");
            return;
        }
        ConnectionFactory factory = new ConnectionFactory();
        factory.setUri(System.getenv().getOrDefault("BIDE_URL", "amqp://localhost"));
        // A program that goes on after a lost connection has to declare its targets again.
        factory.setAutomaticRecoveryEnabled(false);
        int code = 0;
        try (Connection connection = factory.newConnection()) {
            new Main(connection).run(args);
        } catch (Exception error) {
            Throwable reason = error.getCause() == null ? error : error.getCause();
            System.err.println(reason.getMessage());
            code = 1;
        }
        System.exit(code);
    }

    private void run(String[] args) throws Exception {
        switch (args[0]) {
            case "delay" -> delay(target(args[1]), Long.parseLong(args[2]), utf8(args[3]));
            case "receive" -> receive(args[1], Integer.parseInt(args[2]));
            case "retry" -> retry(args[1], Long.parseLong(args[2]));
            case "schedule" -> schedule(args[1], args[2], Long.parseLong(args[3]), utf8(args[4]));
            case "scheduled" -> System.out.println(Wire.JSON.toJson(new Log().ask(args[1])));
            default -> cancel(args[1]);
        }
    }

    /** From JSON: {"queue": "orders"} or {"exchange": "shop", "routing_key": "order.created"}. */
    private static Wire.Target target(String json) {
        return Wire.Target.of(Wire.fields(Wire.JSON.fromJson(json, Object.class)));
    }

    private static byte[] utf8(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    // -- delayed messages

    private void delay(Wire.Target target, long milliseconds, byte[] body) throws Exception {
        AMQP.BasicProperties properties = new AMQP.BasicProperties.Builder().headers(Map.of()).build();
        System.out.println("due " + publishDelayed(confirming(), target, milliseconds, properties, body));
    }

    private long publishDelayed(
        Channel channel, Wire.Target target, long milliseconds, AMQP.BasicProperties given, byte[] body) throws Exception {
        // This exchange exists if 'bide delay apply' was run: without it, digit queues may be missing.
        channel.exchangeDeclarePassive(Wire.BASE + ".complete");
        Wire.Declarations declare = delayed(target, milliseconds, given).declare();
        for (Wire.Queue one : declare.queues()) channel.queueDeclare(one.name(), true, false, false, one.arguments());
        for (Wire.Binding one : declare.bindings()) {
            if (one.toQueue()) channel.queueBind(one.destination(), one.source(), one.routingKey());
            else channel.exchangeBind(one.destination(), one.source(), one.routingKey());
        }
        Wire.Publish publish = delayed(target, milliseconds, given).publish(); // the delay begins now
        String messageId = given.getMessageId() == null ? UUID.randomUUID().toString() : given.getMessageId();
        AMQP.BasicProperties properties = given.builder()
            .headers(publish.headers()).priority(publish.priority()).expiration(publish.expiration())
            .deliveryMode(2).messageId(messageId).build();
        publishConfirmed(channel, publish.exchange(), publish.routingKey(), properties, body, Log.TIMEOUT_MILLISECONDS);
        return (Long) publish.headers().get("bide-due");
    }

    private Wire.Delayed delayed(Wire.Target target, long milliseconds, AMQP.BasicProperties given) {
        String release = connection.getServerProperties().get("version").toString();
        return Wire.delayed(
            target, milliseconds, System.currentTimeMillis(), release, given.getHeaders(), given.getPriority(),
            given.getExpiration());
    }

    private Channel confirming() throws Exception {
        Channel channel = connection.createChannel();
        channel.confirmSelect();
        return channel;
    }

    /** Publish a message, and wait until the broker has it. A message without a queue is an error. */
    private static void publishConfirmed(
        Channel channel, String exchange, String routingKey, AMQP.BasicProperties properties, byte[] body, long milliseconds)
        throws Exception {
        CompletableFuture<String> returned = new CompletableFuture<>();
        channel.clearReturnListeners();
        channel.addReturnListener((code, text, from, key, returnedProperties, returnedBody) -> returned.complete(text));
        channel.basicPublish(exchange, routingKey, true, properties, body);
        if (!channel.waitForConfirms(milliseconds)) {
            throw new IllegalStateException("the broker refused the message for " + exchange + " " + routingKey);
        }
        // The broker returns a message before it confirms it.
        if (returned.isDone()) throw new IllegalStateException("no queue takes messages for " + exchange + " " + routingKey);
    }

    // -- received messages

    private void receive(String queue, int count) throws Exception {
        Channel channel = connection.createChannel();
        BlockingQueue<Delivery> deliveries = deliveries(channel, queue, count);
        for (int received = 0; received < count; received++) {
            Delivery delivery = deliveries.take();
            Map<String, Object> headers = headers(delivery);
            Map<String, Object> shown = new LinkedHashMap<>();
            shown.put("body", new String(delivery.getBody(), StandardCharsets.UTF_8));
            shown.put("due", Wire.Received.of(headers).due());
            shown.put("key", Wire.Received.of(headers).key());
            shown.put("received", System.currentTimeMillis());
            shown.put("headers", Wire.copy(headers));
            System.out.println(Wire.JSON.toJson(shown));
            channel.basicAck(delivery.getEnvelope().getDeliveryTag(), false);
        }
        channel.close();
    }

    /** Delay a copy of a message, and acknowledge the message when the broker has the copy. */
    private void retry(String queue, long milliseconds) throws Exception {
        Channel channel = confirming();
        Delivery delivery = deliveries(channel, queue, 1).take();
        Map<String, Object> headers = headers(delivery);
        // Without the user id: the broker refuses the name of another user.
        AMQP.BasicProperties.Builder copy = delivery.getProperties().builder().headers(Wire.copy(headers)).userId(null);
        if (headers.get("bide-priority") instanceof Number priority) copy.priority(priority.intValue());
        if (headers.get("bide-expiration") instanceof String expiration) copy.expiration(expiration);
        publishDelayed(
            channel, new Wire.Target(queue, false, null, null), milliseconds, copy.build(), delivery.getBody());
        channel.basicAck(delivery.getEnvelope().getDeliveryTag(), false);
        channel.close();
    }

    private static BlockingQueue<Delivery> deliveries(Channel channel, String queue, int prefetch) throws Exception {
        BlockingQueue<Delivery> deliveries = new LinkedBlockingQueue<>();
        channel.basicQos(prefetch);
        channel.basicConsume(queue, false, (tag, delivery) -> deliveries.add(delivery), tag -> {
            System.err.println("the queue " + queue + " was deleted");
            System.exit(1);
        });
        return deliveries;
    }

    /** The headers of a message; the client has a type of its own for text. */
    private static Map<String, Object> headers(Delivery delivery) {
        Map<String, Object> headers = new HashMap<>();
        Map<String, Object> given = delivery.getProperties().getHeaders();
        if (given != null) {
            given.forEach((name, value) -> headers.put(name, value instanceof LongString text ? text.toString() : value));
        }
        return headers;
    }

    // -- schedules

    private void schedule(String key, String target, long milliseconds, byte[] body) throws Exception {
        long now = System.currentTimeMillis();
        Map<String, Object> properties = Map.of(
            "delivery_mode", 2, "message_id", UUID.randomUUID().toString(), "headers", Map.of("bide-sent", now));
        Map<String, Object> operation = Map.of(
            "kind", "schedule", "key", key, "target", Wire.JSON.fromJson(target, Object.class), "due", now + milliseconds);
        String version = new Log().append(operation, new Wire.Message(properties, body), false).get("version").toString();
        System.out.println("scheduled, version " + version);
    }

    private void cancel(String key) throws Exception {
        System.out.println(new Log().append(Map.of("kind", "cancel", "key", key), null, true).get("outcome"));
    }

    /** Appends operations to the schedule log. */
    private final class Log {
        static final long TIMEOUT_MILLISECONDS = 300_000;
        private static final long REPEAT_AFTER_MILLISECONDS = 2_000;
        private static final int RESERVATION_BYTES = 64_000;
        private static final int RECORD_OVERHEAD = 250;

        /** A channel on which nothing else is published, and the numbers of the requests. */
        private static final class Partition {
            final Channel channel;
            final String session;
            int number;
            int room;

            Partition(Channel channel) {
                byte[] random = new byte[10];
                new SecureRandom().nextBytes(random);
                this.channel = channel;
                this.session = HexFormat.of().formatHex(random);
            }
        }

        private static final String REPLY_TO = "amq.rabbitmq.reply-to";

        private final Map<Integer, Partition> partitions = new HashMap<>();
        private final Map<String, CompletableFuture<byte[]>> answers = new ConcurrentHashMap<>();
        /** For reservations and questions. */
        private final Channel others = answered();

        Log() throws Exception {}

        /**
         * Append an operation on a key, and repeat it until it is confirmed, or answered if it needs an answer. Gates apply a
         * repeated request once. Returns the answer; that of an unconditional schedule is known.
         */
        Map<String, Object> append(Map<String, ?> operation, Wire.Message message, boolean needsAnswer) throws Exception {
            Partition partition = partition(Wire.partition((String) operation.get("key")));
            String request = partition.session + "-" + ++partition.number;
            Map<String, Object> numbered = new HashMap<>(operation);
            numbered.put("request", request);
            Wire.Record record = Wire.record(numbered, message, System.currentTimeMillis());
            CompletableFuture<byte[]> answer = new CompletableFuture<>();
            answers.put(request, answer);
            AMQP.BasicProperties properties = new AMQP.BasicProperties.Builder()
                .deliveryMode(2).messageId(request).correlationId(request).replyTo(REPLY_TO).build();
            String routingKey = record.routingKeys().get(0);
            long until = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(TIMEOUT_MILLISECONDS);
            boolean isConfirmed = false;
            while (System.nanoTime() < until) {
                takeRoom(partition, routingKey, record.body().length);
                try {
                    publishConfirmed(
                        partition.channel, record.exchange(), routingKey, properties, record.body(), REPEAT_AFTER_MILLISECONDS);
                    if (!needsAnswer) return Map.of("outcome", "scheduled", "version", request);
                    isConfirmed = true;
                    return Wire.answer(answer.get(REPEAT_AFTER_MILLISECONDS, TimeUnit.MILLISECONDS));
                } catch (TimeoutException late) {
                    // The gate that should have answered may be gone: any other gives the same answer.
                }
            }
            throw new IllegalStateException(
                isConfirmed ? "the operation is recorded, and no gate answered" : "the broker has not confirmed the operation");
        }

        /** What waits under a key. The leading gate answers. */
        Map<String, Object> ask(String key) throws Exception {
            Wire.Question question = Wire.question(key);
            long until = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(TIMEOUT_MILLISECONDS);
            while (System.nanoTime() < until) {
                String id = UUID.randomUUID().toString();
                CompletableFuture<byte[]> answer = new CompletableFuture<>();
                answers.put(id, answer);
                AMQP.BasicProperties properties = new AMQP.BasicProperties.Builder()
                    .messageId(id).correlationId(id).replyTo(REPLY_TO)
                    .expiration(Long.toString(REPEAT_AFTER_MILLISECONDS)).build();
                try {
                    publishConfirmed(
                        others, question.exchange(), question.routingKey(), properties, question.body(),
                        REPEAT_AFTER_MILLISECONDS);
                    return Wire.state(answer.get(REPEAT_AFTER_MILLISECONDS, TimeUnit.MILLISECONDS));
                } catch (TimeoutException late) {
                    // Ask again.
                }
            }
            throw new IllegalStateException("no gate answered");
        }

        private Partition partition(int number) throws Exception {
            Partition known = partitions.get(number);
            if (known != null) return known;
            Partition opened = new Partition(answered());
            partitions.put(number, opened);
            return opened;
        }

        /** A channel that receives the answers to what is published on it. */
        private Channel answered() throws Exception {
            Channel channel = confirming();
            channel.basicConsume(REPLY_TO, true, (tag, delivery) -> {
                CompletableFuture<byte[]> answer = answers.get(delivery.getProperties().getCorrelationId());
                if (answer != null) answer.complete(delivery.getBody());
            }, tag -> {});
            return channel;
        }

        /** A reservation stands for 64 KB of records. The broker refuses it when no gate has carried the log forward for long. */
        private void takeRoom(Partition partition, String routingKey, int bytes) throws Exception {
            AMQP.BasicProperties persistent = new AMQP.BasicProperties.Builder().deliveryMode(2).build();
            for (partition.room -= bytes + RECORD_OVERHEAD; partition.room < 0; partition.room += RESERVATION_BYTES) {
                publishConfirmed(
                    others, Wire.BASE + ".schedule", "room." + routingKey, persistent, new byte[0], TIMEOUT_MILLISECONDS);
            }
        }
    }
}

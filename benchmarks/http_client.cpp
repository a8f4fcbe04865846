// A closed-loop HTTP client: every connection sends the same request again as soon as its answer is complete.
//
//   http_client PORT CONNECTIONS SECONDS REQUEST_FILE [PAUSE_MS]
//
// REQUEST_FILE holds the raw bytes of one request, head and body. A connection whose request was refused (429) waits for
// PAUSE_MS, 0 by default, times a random number from 0.5 to 1.5, so that refused connections do not return together.
// So does every connection before its first request, because hundreds of requests at the same moment are no steady load.
// The seconds begin when every connection has asked.
// One line of JSON comes out: answered and refused requests, seconds, p50_us and p99_us of both, and failures (answers
// other than 200 and 429). One thread; connections are multiplexed by epoll.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

using Clock = std::chrono::steady_clock;

struct Connection {
  int socket = -1;
  std::string answer;
  Clock::time_point sent;
  Clock::time_point again;  // when a pause ends
  bool pauses = false;
};

[[noreturn]] static void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

static int connect_to(int port) {
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address)) fail("connect");
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return fd;
}

static void send_request(Connection& connection, const std::string& request) {
  connection.answer.clear();
  connection.sent = Clock::now();
  for (size_t done = 0; done < request.size();) {
    ssize_t written = write(connection.socket, request.data() + done, request.size() - done);
    if (written <= 0) fail("write");
    done += static_cast<size_t>(written);
  }
}

// True once the head and its Content-Length bytes have arrived.
static bool is_whole(const std::string& answer) {
  size_t head = answer.find("\r\n\r\n");
  if (head == std::string::npos) return false;
  const char* length = strcasestr(answer.c_str(), "\r\ncontent-length:");
  if (!length) fail("answer without Content-Length");
  return answer.size() >= head + 4 + std::strtoul(length + 17, nullptr, 10);
}

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6)
    return std::fprintf(stderr, "http_client PORT CONNECTIONS SECONDS REQUEST_FILE [PAUSE_MS]\n"), 2;
  const double pause_ms = argc == 6 ? std::atof(argv[5]) : 0;
  std::mt19937 random(1);
  std::uniform_real_distribution<double> spread(0.5, 1.5);
  std::ifstream file(argv[4], std::ios::binary);
  const std::string request{std::istreambuf_iterator<char>(file), {}};
  std::vector<Connection> connections(std::strtoul(argv[2], nullptr, 10));
  const int poll = epoll_create1(0);
  for (size_t i = 0; i < connections.size(); ++i) {
    connections[i].socket = connect_to(std::atoi(argv[1]));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = i;
    epoll_ctl(poll, EPOLL_CTL_ADD, connections[i].socket, &event);
  }

  const auto rest = [&](Connection& connection) {
    const std::chrono::duration<double, std::milli> pause(pause_ms * spread(random));
    connection.pauses = true;
    connection.again = Clock::now() + std::chrono::duration_cast<Clock::duration>(pause);
  };

  std::vector<double> answered_us, refused_us;
  size_t failures = 0;
  const std::chrono::duration<double, std::milli> longest_pause(1.5 * pause_ms);
  const auto begin = Clock::now() + std::chrono::duration_cast<Clock::duration>(longest_pause);
  const auto end = begin + std::chrono::duration<double>(std::atof(argv[3]));
  for (auto& connection : connections) {
    if (pause_ms > 0) rest(connection);
    else send_request(connection, request);
  }
  std::vector<epoll_event> events(connections.size());
  std::vector<char> buffer(1 << 20);
  while (Clock::now() < end) {
    int wait_ms = 1000;
    for (auto& connection : connections) {
      if (!connection.pauses) continue;
      wait_ms = 1;
      if (Clock::now() < connection.again) continue;
      connection.pauses = false;
      send_request(connection, request);
    }
    const int ready = epoll_wait(poll, events.data(), static_cast<int>(events.size()), wait_ms);
    for (int i = 0; i < ready; ++i) {
      auto& connection = connections[events[i].data.u64];
      const ssize_t received = read(connection.socket, buffer.data(), buffer.size());
      if (received <= 0) fail("the server closed a connection");
      connection.answer.append(buffer.data(), static_cast<size_t>(received));
      if (!is_whole(connection.answer)) continue;
      const bool is_refused = connection.answer.compare(0, 13, "HTTP/1.1 429 ") == 0;
      if (connection.sent >= begin)
        (is_refused ? refused_us : answered_us)
            .push_back(std::chrono::duration<double, std::micro>(Clock::now() - connection.sent).count());
      failures += !is_refused && connection.answer.compare(0, 13, "HTTP/1.1 200 ") != 0;
      if (is_refused && pause_ms > 0) rest(connection);
      else send_request(connection, request);
    }
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  if (answered_us.empty()) fail("no answer came");
  auto percentile = [](std::vector<double>& times_us, double ratio) {
    std::sort(times_us.begin(), times_us.end());
    return times_us.empty() ? 0.0 : times_us[static_cast<size_t>(ratio * (times_us.size() - 1))];
  };
  std::printf("{\"requests\": %zu, \"seconds\": %.6f, \"p50_us\": %.2f, \"p99_us\": %.2f, \"failures\": %zu,"
              " \"refused\": %zu, \"refused_p50_us\": %.2f, \"refused_p99_us\": %.2f}\n",
              answered_us.size(), seconds, percentile(answered_us, 0.50), percentile(answered_us, 0.99), failures,
              refused_us.size(), percentile(refused_us, 0.50), percentile(refused_us, 0.99));
}
